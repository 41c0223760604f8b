"""mega-eval knows every flag of Megatron's that mega-train knows."""

from __future__ import annotations

from mega_eval.megatron_command_line import list_flags
from mega_train.compat.megatron_flags import flag_table


def test_every_flag_of_the_trainers_table_is_accepted() -> None:
    assert set(flag_table().names) - list_flags() == set()
