"""Open a checkpoint over several ranks, as rank 0."""

from __future__ import annotations

from pathlib import Path

from mega_eval.models.decoder_model import choose_dtype, identify_checkpoint
from mega_eval.models.rank_model import RankModel, RankWatch
from mega_eval.models.rank_processes import RankProcesses, TorchrunProcesses
from mega_eval.models.rank_setup import RankSettings, check_layout, open_engine
from mega_model.distributed.mesh import World
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.spec_checks import require_decoder


def open_ranks(settings: RankSettings, world: World | None, init_method: str = "env://") -> RankModel:
    """Open a checkpoint over the ranks of a layout.

    Args:
        world: this process among those that torchrun started; None: start them here.

    Raises:
        MegaError: the checkpoint cannot be loaded or split.
    """
    checkpoint = Checkpoint.open(Path(settings.load))
    require_decoder(checkpoint.spec, checkpoint.folder)
    check_layout(checkpoint, settings)
    watch: RankWatch
    if world is None:
        size = settings.layout.world
        watch = processes = RankProcesses(size, settings)
        world, init_method = World(size), processes.init_method
    else:
        watch = TorchrunProcesses()
    try:
        engine = open_engine(world, settings, init_method)
    except RuntimeError as error:
        lost = watch.explain(error)
        watch.close()
        raise lost from None
    except BaseException:
        watch.close()
        raise
    identity = identify_checkpoint(
        checkpoint,
        engine.tokenizer,
        dtype=choose_dtype(checkpoint, settings.dtype),
        device=engine.mesh.device.type,
        layout=settings.layout,
    )
    return RankModel(engine, identity, watch)
