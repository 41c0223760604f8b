"""The command that fine-tunes, with the meaning that Megatron's tasks give to --keep-last."""

from __future__ import annotations

import click

from mega_train.commands.grouped_help import EVERYDAY, GroupedHelp

_TASK = ("--task", "--train-data", "--valid-data", "--epochs", "--pretrained-checkpoint")
_NOT_OF_TASKS = frozenset({"--preset", "--data-path", "--train-iters", "--save-interval"})


class FinetuneCommand(GroupedHelp):
    """A training command in which --keep-last without a number keeps an epoch's last batch."""

    everyday = (*_TASK, *(flag for flag in EVERYDAY if flag not in _NOT_OF_TASKS))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Replace Megatron's --keep-last by --keep-last-batch, then parse as every training command does."""
        return super().parse_args(ctx, [*map(_translate, args, [*args[1:], ""])])


def _translate(word: str, next_word: str) -> str:
    """Return the word; --keep-last only keeps its name before a number, which counts checkpoints."""
    is_count = next_word.lstrip("-").isdecimal()
    return "--keep-last-batch" if word == "--keep-last" and not is_count else word
