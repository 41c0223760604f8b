"""Megatron's classic checkpoints: bitwise round trips, and files that torch.load reads as Megatron does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_ckpt.formats.interface import WriteOptions
from mega_ckpt.formats.megatron.names import LEGACY, chunk_tensors
from mega_ckpt.name_maps.alias import whole_slab
from mega_ckpt.operations.convert import convert
from mega_ckpt.tensors import dtypes
from mega_schema.arch import table
from mega_schema.checkpoint.checkpoint_dir import FORMAT
from mega_schema.checkpoint.reader import MODEL, OPTIMIZER, BoxToWrite, Checkpoint
from mega_schema.checkpoint.side_files import rewrite_checksums
from mega_schema.checkpoint.writer import CheckpointWriter
from mega_schema.errors import FormatError
from mega_schema.parallel_layout import WHOLE, Layout
from mega_schema.spec import ModelSpec, gpt, llama

FILE = "model_optim_rng.pt"
RATE = {"peak": 1e-3, "least": 1e-5, "warmup": 16.0, "decay": 320, "style": "cosine", "initial": 1e-6}
DECAY = {"start": 0.1, "end": 0.1, "samples": 320, "style": "constant"}
TRAINER = {
    "iteration": 3,
    "consumed_samples": 24,
    "skipped_samples": 8,
    "optimizer_steps": 2,
    "lr_schedule": RATE,
    "wd_schedule": DECAY,
}
SCALE = {"loss_scale": {"value": 1024.0, "growth_tracker": 5, "hysteresis_tracker": 1}}


def _save(run: Path, spec: ModelSpec, *, narrow: bool = True, seed: int = 5) -> Checkpoint:
    """A checkpoint of random numbers, of bfloat16 where it is narrow."""
    rng, save = np.random.default_rng(seed), CheckpointWriter(run, 3)
    save.begin()
    rows = [row for row in table(spec) if row.tied_to is None]
    main = {row.name: rng.normal(size=row.shape).astype(np.float32) for row in rows}
    for space in (MODEL, *OPTIMIZER) if narrow else (MODEL, *OPTIMIZER[1:]):
        kind = "BF16" if space == MODEL and narrow else "F32"

        def values(box: BoxToWrite, space: str = space) -> np.ndarray:
            if space in (MODEL, OPTIMIZER[0]):
                return dtypes.cast(main[box.name], "F32", box.dtype, box.name)
            return rng.normal(size=box.whole).astype(np.float32)

        save.write(
            space, 0, [BoxToWrite(row.name, row.shape, whole_slab(row.shape), kind) for row in rows], values
        )
    config = "[optimizer]\nadam_beta1 = 0.8\nweight_decay = 0.1\n"
    trainer = TRAINER | SCALE if narrow else TRAINER
    save.commit(spec, layout=WHOLE, trainer=trainer, tokenizer=None, run_config=config)
    return Checkpoint.open(run)


def _equal(first: Checkpoint, second: Checkpoint) -> None:
    assert first.tensors.keys() == second.tensors.keys()
    for space, tensors in first.tensors.items():
        for name, tensor in tensors.items():
            assert second.tensors[space][name].dtype == tensor.dtype
            whole = whole_slab(tensor.shape)
            assert np.array_equal(first.read_raw(space, name, whole), second.read_raw(space, name, whole)), (
                name
            )


def _tree(folder: Path, tp: int = 0, pp: int | None = None) -> dict[str, Any]:
    name = f"mp_rank_{tp:02d}" + ("" if pp is None else f"_{pp:03d}")
    return torch.load(folder / name / FILE, weights_only=False)  # type: ignore[no-any-return]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    tensors = {}
    for key, value in tree.items():
        tensors |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return tensors


@st.composite
def _cases(draw: st.DrawFn) -> tuple[ModelSpec, Layout, str]:
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    vp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    width, groups = draw(st.sampled_from([2, 6])), tp * draw(st.integers(1, 2))
    heads = groups * draw(st.integers(1, 3))
    build, form = draw(st.sampled_from([gpt, llama])), draw(st.sampled_from(["megatron", "megatron-core"]))
    values: dict[str, Any] = {
        "layers": pp * vp * draw(st.integers(1, 2)),
        "hidden": draw(st.sampled_from([8, 12])),
        "heads": heads,
        "kv_heads": groups,
        "head_dim": width,
        "ffn": 4 * draw(st.integers(1, 3)),
        "vocab": draw(st.integers(2, 40)),
        "max_seq_len": 6,
        "vocab_multiple": draw(st.sampled_from([1, 8])),
        "tied": draw(st.booleans()),
        "norm_1p": draw(st.booleans()),
    }
    if build is gpt:
        values |= {
            "activation": draw(st.sampled_from(["gelu_tanh", "gelu_erf", "squared_relu", "swiglu"])),
            "positions": draw(st.sampled_from(["learned", "rope", "none"])),
            "post_norm_residual": form == "megatron" and draw(st.booleans()),
            "norm": draw(st.sampled_from(["layernorm", "rmsnorm"])),
        }
    return build(**values), Layout(tp=tp, pp=pp, vp=vp), form


@pytest.mark.parametrize("examples", [12, pytest.param(60, marks=pytest.mark.long)])
def test_there_and_back_is_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(case=_cases(), narrow=st.booleans())
    def check(case: tuple[ModelSpec, Layout, str], narrow: bool) -> None:
        _check_there_and_back(tmp_path_factory.mktemp("case"), *case, narrow=narrow)

    check()


def _check_there_and_back(folder: Path, spec: ModelSpec, layout: Layout, form: str, *, narrow: bool) -> None:
    core = form == "megatron-core"
    ours = _save(folder / "ours", spec, narrow=narrow)
    convert(
        folder / "ours",
        folder / "theirs",
        "mega",
        form,
        target=WriteOptions(layout=layout, optimizer=not core),
    )
    convert(folder / "theirs", folder / "back", form, "mega")
    back = Checkpoint.open(folder / "back")
    assert {**back.spec.to_dict(), "family": ""} == {**spec.to_dict(), "family": ""}
    assert back.spec.family == spec.family or spec.family == "gpt"  # files do not store it
    if core:
        assert back.tensors.keys() == {MODEL}
        assert back.trainer == TRAINER | {"optimizer_steps": 3}  # which are the iterations, where it is left
        ours.tensors = {MODEL: ours.tensors[MODEL]}
    else:
        assert back.trainer == (TRAINER | SCALE if narrow else TRAINER)
    _equal(ours, back)


@pytest.mark.parametrize("form", ["megatron", "megatron-core", "torch_dist"])
def test_a_rate_that_falls_at_the_end_comes_back_with_how_and_how_long(
    tmp_path: Path, small_gpt: ModelSpec, form: str
) -> None:
    rate = RATE | {"style": "WSD", "anneal": 64, "anneal_style": "linear"}
    ours = _save(tmp_path / "ours", small_gpt)
    (ours.folder / "trainer.json").write_text(json.dumps(TRAINER | {"lr_schedule": rate}), "utf-8")
    rewrite_checksums(ours.folder, FORMAT)
    convert(tmp_path / "ours", tmp_path / "theirs", "mega", form, target=WriteOptions(optimizer=False))
    convert(tmp_path / "theirs", tmp_path / "back", form, "mega")
    back = Checkpoint.open(tmp_path / "back").trainer
    assert (back["lr_schedule"], back["wd_schedule"]) == (rate, DECAY)


@pytest.mark.parametrize(
    "trainer",
    [
        {"lr_schedule": {}},
        {"lr_schedule": RATE, "wd_schedule": {"start": 0.1}},
        {"loss_scale": {"value": 2.0}},
        {"learning_rate": "much"},
        {"optimizer_steps": None},
    ],
)
@pytest.mark.parametrize("form", ["megatron", "torch_dist"])
def test_a_trainer_file_that_no_training_wrote_is_refused_in_one_line(
    tmp_path: Path, small_gpt: ModelSpec, form: str, trainer: dict[str, Any]
) -> None:
    ours = _save(tmp_path / "ours", small_gpt)
    (ours.folder / "trainer.json").write_text(json.dumps(TRAINER | trainer), "utf-8")
    rewrite_checksums(ours.folder, FORMAT)
    with pytest.raises(FormatError, match="trainer.json: is not what mega-train writes: found "):
        convert(tmp_path / "ours", tmp_path / "theirs", "mega", form)
    assert not (tmp_path / "theirs").exists()


def test_a_rate_of_its_own_that_megatron_has_no_place_for_is_told(
    tmp_path: Path, small_gpt: ModelSpec
) -> None:
    ours = _save(tmp_path / "ours", small_gpt)
    (ours.folder / "trainer.json").write_text(json.dumps(TRAINER | {"decoupled_lr_schedule": RATE}), "utf-8")
    rewrite_checksums(ours.folder, FORMAT)
    left = convert(tmp_path / "ours", tmp_path / "theirs", "mega", "megatron").dropped
    assert "the learning rate of embedding and output" in left


def test_torch_finds_every_key_and_the_arguments(tmp_path: Path, small_gpt: ModelSpec) -> None:
    spec = dataclasses.replace(small_gpt, layers=4, vocab_multiple=8)
    _save(tmp_path / "ours", spec)
    layout = Layout(tp=2, pp=2, vp=2)
    convert(tmp_path / "ours", tmp_path / "theirs", "mega", "megatron", target=WriteOptions(layout=layout))
    assert (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").read_text("utf-8") == "3"
    for tp, pp in np.ndindex(2, 2):
        tree = _tree(tmp_path / "theirs" / "iter_0000003", tp, pp)
        args = tree["args"]
        assert (tree["checkpoint_version"], tree["iteration"], args.padded_vocab_size) == (3.0, 3, 16)
        assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.rank) == (
            2,
            2,
            tp + 2 * pp,
        )
        assert (args.num_layers, args.hidden_size, args.num_attention_heads) == (4, 8, 4)
        assert args.params_dtype == torch.bfloat16
        assert args.num_layers_per_virtual_pipeline_stage == 1
        for chunk in range(2):
            shapes = {name: tuple(t.shape) for name, t in _flat(tree[f"model{chunk}"]).items()}
            expected = chunk_tensors(spec, LEGACY, layout, tp=tp, pp=pp, chunk=chunk)
            assert shapes == {foreign.name: foreign.shape for foreign in expected}


def test_norms_of_one_and_a_weight_are_told_by_the_name_of_either_release(
    tmp_path: Path, small_gpt: ModelSpec
) -> None:
    _save(tmp_path / "ours", dataclasses.replace(small_gpt, norm_1p=True))
    convert(tmp_path / "ours", tmp_path / "theirs", "mega", "megatron-core")
    names = {"apply_layernorm_1p", "layernorm_zero_centered_gamma"}
    for name in names:
        tree = _tree(tmp_path / "theirs" / "iter_0000003")
        assert names <= vars(tree["args"]).keys()
        for norm in names - {name}:
            delattr(tree["args"], norm)
        (tmp_path / name / "mp_rank_00").mkdir(parents=True)
        torch.save(tree, tmp_path / name / "mp_rank_00" / FILE)
        convert(tmp_path / name, tmp_path / f"back-{name}", "megatron-core", "mega")
        assert Checkpoint.open(tmp_path / f"back-{name}").spec.norm_1p


def test_padding_is_the_last_row_again(tmp_path: Path, small_gpt: ModelSpec) -> None:
    spec = dataclasses.replace(small_gpt, vocab=5, vocab_multiple=4)
    ours = _save(tmp_path / "ours", spec, narrow=False)
    convert(
        tmp_path / "ours", tmp_path / "theirs", "mega", "megatron", target=WriteOptions(layout=Layout(tp=4))
    )
    last = ours.model_slab("embed.weight", whole_slab((5, 8)))[4]
    embeddings, moments = [], []
    for tp in range(4):
        tree = _tree(tmp_path / "theirs" / "iter_0000003", tp)
        embeddings.append(tree["model"]["language_model"]["embedding"]["word_embeddings"]["weight"])
        moments.append(tree["optimizer"]["state"][0]["exp_avg"])
    assert (torch.cat(embeddings)[5:].numpy() == last).all()
    assert torch.cat(embeddings).shape == (16, 8)
    assert not torch.cat(moments)[5:].any()


class _Linear(torch.nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, columns))
        self.bias = torch.nn.Parameter(torch.zeros(rows))


def _megatrons_model(d: int) -> torch.nn.Module:
    """Modules as Megatron's GPT registers them, one layer, where the first stage is not the last."""
    layer = torch.nn.ModuleDict(
        {
            "input_layernorm": torch.nn.LayerNorm(d),
            "self_attention": torch.nn.ModuleDict(
                {"query_key_value": _Linear(3 * d, d), "dense": _Linear(d, d)}
            ),
            "post_attention_layernorm": torch.nn.LayerNorm(d),
            "mlp": torch.nn.ModuleDict(
                {"dense_h_to_4h": _Linear(4 * d, d), "dense_4h_to_h": _Linear(d, 4 * d)}
            ),
        }
    )
    embedding = torch.nn.ModuleDict(
        {"word_embeddings": torch.nn.Embedding(16, d), "position_embeddings": torch.nn.Embedding(6, d)}
    )
    encoder = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})
    return torch.nn.ModuleDict(
        {"language_model": torch.nn.ModuleDict({"embedding": embedding, "encoder": encoder})}
    )


def test_torchs_optimizer_over_megatrons_groups_takes_up_the_state(
    tmp_path: Path, small_gpt: ModelSpec
) -> None:
    spec = dataclasses.replace(small_gpt, vocab_multiple=16)
    ours = _save(tmp_path / "ours", spec, narrow=False)
    convert(
        tmp_path / "ours", tmp_path / "theirs", "mega", "megatron", target=WriteOptions(layout=Layout(pp=2))
    )
    tree = _tree(tmp_path / "theirs" / "iter_0000003", 0, 0)
    model = _megatrons_model(spec.hidden)
    model.load_state_dict(_flat(tree["model"]))
    named = list(model.named_parameters())
    small = [p for name, p in named if name.endswith(".bias") or p.dim() == 1]
    large = [p for name, p in named if not (name.endswith(".bias") or p.dim() == 1)]
    adam = torch.optim.AdamW([{"params": large}, {"params": small}])
    adam.load_state_dict(tree["optimizer"])
    assert [group["weight_decay"] for group in adam.param_groups] == [0.1, 0.0]
    assert adam.param_groups[0]["betas"] == (0.8, 0.999)
    names = {foreign.name: foreign for foreign in chunk_tensors(spec, LEGACY, Layout(pp=2), tp=0, pp=0)}
    for name, parameter in named:
        state, foreign = adam.state[parameter], names[name]
        assert state["step"] == 2
        for space, key in (("optim.exp_avg", "exp_avg"), ("optim.exp_avg_sq", "exp_avg_sq")):
            for box in foreign.boxes:
                wanted = ours.read(space, foreign.ours, box)
                assert np.array_equal(foreign.select(state[key].numpy(), box.in_local), wanted), name
    adam.step()


@pytest.mark.parametrize("era", ["23.06", "0.6", "0.8"])
def test_the_vectors_of_a_distributed_optimizer_are_taken_apart(
    tmp_path: Path, small_gpt: ModelSpec, era: str
) -> None:
    """The test writes Megatron's buffers: the last parameter first."""
    ours = _save(tmp_path / "ours", small_gpt)
    layout = Layout(tp=2, pp=2)
    convert(tmp_path / "ours", tmp_path / "theirs", "mega", "megatron", target=WriteOptions(layout=layout))
    for rank in sorted((tmp_path / "theirs" / "iter_0000003").iterdir()):
        tree = torch.load(rank / FILE, weights_only=False)
        adam, mains = tree["optimizer"]["optimizer"], tree["optimizer"]["fp32_from_fp16_params"]
        parameters = _flat(tree["model"])
        counts = {True: iter(range(99)), False: iter(range(99))}
        order = []
        for name, parameter in parameters.items():
            decays = parameter.dim() == 2 and not name.endswith(".bias")
            place = next(counts[decays])
            order.append({"param": mains[not decays][place]})
            order[-1] |= adam["state"][adam["param_groups"][not decays]["params"][place]]
        vectors: dict[str, Any] = {}
        for key in ("param", "exp_avg", "exp_avg_sq"):
            flat = torch.zeros(0)
            for position in reversed(order):
                if era == "0.8":
                    flat = torch.cat([flat, torch.zeros(-len(flat) % 64)])
                flat = torch.cat([flat, position[key].flatten()])
            vectors[key] = torch.cat([flat, torch.zeros(-len(flat) % 3)]) if era == "23.06" else flat
        key: Any = torch.float32
        state: dict[Any, Any] = {}
        if era != "23.06":
            vectors["numel_unpadded"] = len(vectors["param"])
            key, state = (torch.bfloat16, torch.float32), {"buckets_coalesced": True}
        state[0] = {key: vectors}
        torch.save(state, rank / "distrib_optim.pt")
        tree["args"].data_parallel_size = 3
        groups = [{**group, "params": None} for group in adam["param_groups"]]
        tree["optimizer"] = {"optimizer": {"param_groups": groups}, "grad_scaler": {}}
        torch.save(tree, rank / FILE)
    result = convert(tmp_path / "theirs", tmp_path / "back", "megatron", "mega")
    assert result.dropped == ("245 rows of padding",)
    _equal(ours, Checkpoint.open(tmp_path / "back"))


def test_an_optimizer_of_an_unknown_layout_stays_behind_and_it_is_said(
    tmp_path: Path, small_gpt: ModelSpec
) -> None:
    ours = _save(tmp_path / "ours", small_gpt)
    convert(tmp_path / "ours", tmp_path / "theirs", "mega", "megatron")
    rank = tmp_path / "theirs" / "iter_0000003" / "mp_rank_00"
    tree = torch.load(rank / FILE, weights_only=False)
    tree["optimizer"]["optimizer"]["param_groups"][0]["params"].pop()
    tree["rng_state"] = [{"random_rng_state": (3, (1, 2), None)}]
    torch.save(tree, rank / FILE)
    result = convert(tmp_path / "theirs", tmp_path / "back", "megatron", "mega")
    assert result.dropped[:2] == (
        "the random number generator states",
        "the optimizer's state, whose layout is unknown",
    )
    back = Checkpoint.open(tmp_path / "back")
    assert back.tensors.keys() == {MODEL}
    ours.tensors = {MODEL: ours.tensors[MODEL]}
    _equal(ours, back)


RENAMED = {
    "before 2021": (("encoder", "transformer"), ("self_attention", "attention")),
    "after 23.08": (("layernorm", "norm"),),
}


@pytest.mark.parametrize("version", [0, 1.0, 2.0])
@pytest.mark.parametrize("names", RENAMED)
def test_older_names_and_rows_are_the_same_model(
    tmp_path: Path, small_gpt: ModelSpec, names: str, version: float
) -> None:
    ours = _save(tmp_path / "ours", small_gpt)
    convert(
        tmp_path / "ours", tmp_path / "theirs", "mega", "megatron", target=WriteOptions(layout=Layout(tp=2))
    )
    heads, width = small_gpt.heads // 2, small_gpt.head_dim
    for rank in sorted((tmp_path / "theirs" / "iter_0000003").iterdir()):
        tree = torch.load(rank / FILE, weights_only=False)
        del tree["optimizer"]
        encoder = {}
        for name, tensor in tree["model"]["language_model"].pop("encoder").items():
            if "query_key_value" in name and version < 2:
                apart = tensor.unflatten(
                    0, (heads, 3, width)
                )  # as `_transpose_first_dim` of Megatron's loader
                tensor = (apart.transpose(0, 1) if version == 0 else apart.transpose(1, 2)).reshape(
                    tensor.shape
                )
            for old, new in RENAMED[names]:
                name = name.replace(old, new)
            encoder[name] = tensor
        key = "transformer" if names == "before 2021" else "encoder"
        tree["model"]["language_model"][key] = encoder
        tree["checkpoint_version"] = version
        if not version:
            del tree["checkpoint_version"]
        torch.save(tree, rank / FILE)
    convert(tmp_path / "theirs", tmp_path / "back", "megatron", "mega")
    back = Checkpoint.open(tmp_path / "back")
    ours.tensors = {MODEL: ours.tensors[MODEL]}
    _equal(ours, back)


def test_a_stage_of_the_embedding_alone_and_stages_of_unlike_depth_are_read(
    tmp_path: Path, small_llama: ModelSpec
) -> None:
    spec = dataclasses.replace(small_llama, layers=4)
    ours = _save(tmp_path / "ours", spec, narrow=False)
    convert(
        tmp_path / "ours", tmp_path / "theirs", "mega", "megatron", target=WriteOptions(layout=Layout(pp=2))
    )
    folder = tmp_path / "theirs" / "iter_0000003"
    first = torch.load(folder / "mp_rank_00_000" / FILE, weights_only=False)
    last = torch.load(folder / "mp_rank_00_001" / FILE, weights_only=False)
    layers = first["model"]["language_model"].pop("encoder")
    middle = {**first, "model": {"language_model": {"encoder": layers}}}
    for number, tree in enumerate((first, middle, last)):
        tree["args"].pipeline_model_parallel_size = 3
        tree.pop("optimizer")
        (folder / f"mp_rank_00_{number:03d}").mkdir(exist_ok=True)
        torch.save(tree, folder / f"mp_rank_00_{number:03d}" / FILE)
    convert(tmp_path / "theirs", tmp_path / "back", "megatron", "mega")
    ours.tensors = {MODEL: ours.tensors[MODEL]}
    _equal(ours, Checkpoint.open(tmp_path / "back"))


def test_a_model_without_training_is_a_release(
    tmp_path: Path, hf_folder: Callable[..., Path], small_llama: ModelSpec
) -> None:
    load = hf_folder(small_llama)
    convert(load, tmp_path / "theirs", "hf", "megatron", target=WriteOptions(layout=Layout(tp=2)))
    assert (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").read_text("utf-8") == "release"
    convert(tmp_path / "theirs", tmp_path / "back", "megatron", "hf")
    before, after = ((folder / "model.safetensors").read_bytes() for folder in (load, tmp_path / "back"))
    assert before == after
    (tmp_path / "theirs/release").rename(tmp_path / "theirs/.release.replaced")  # killed as it was replaced
    assert (
        convert(tmp_path / "theirs", tmp_path / "again", "megatron", "mega").written.folder.name
        == "iter_0000000"
    )


def test_ranks_that_differ_in_what_all_have_are_told(tmp_path: Path, small_gpt: ModelSpec) -> None:
    _save(tmp_path / "ours", small_gpt)
    convert(
        tmp_path / "ours", tmp_path / "theirs", "mega", "megatron", target=WriteOptions(layout=Layout(tp=2))
    )
    file = tmp_path / "theirs" / "iter_0000003" / "mp_rank_01" / FILE
    tree = torch.load(file, weights_only=False)
    tree["model"]["language_model"]["encoder"]["final_layernorm.bias"][0] += 1
    torch.save(tree, file)
    left = convert(tmp_path / "theirs", tmp_path / "back", "megatron", "mega").dropped
    assert "copies of final_norm.bias that differ between ranks" in left


def test_the_flags_of_megatrons_tool_are_ours(
    tmp_path: Path, small_gpt: ModelSpec, mega: Callable[..., Result]
) -> None:
    _save(tmp_path / "ours", small_gpt)
    result = mega(
        *(
            "convert",
            "--from",
            "mega",
            "--to",
            "megatron",
            "--model-type",
            "GPT",
            "--load-dir",
            tmp_path / "ours",
        ),
        *("--save-dir", tmp_path / "theirs", "--target-tensor-parallel-size", 2),
        *("--target-pipeline-parallel-size", 2),
    )
    assert result.exit_code == 0, result.exception
    names = sorted(path.name for path in (tmp_path / "theirs" / "iter_0000003").iterdir())
    assert names == ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
