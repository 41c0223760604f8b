"""Configuration: priority of sources, errors with names, and round trips through TOML."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mega_schema.app.click_options import MultiValueCommand
from mega_schema.app.config import (
    WordList,
    add_flags,
    config_keys,
    did_you_mean,
    key_of_flag,
    load_config,
    multi_option,
    option,
    to_toml,
)
from mega_schema.errors import ConfigError

RULE = "hint: a key is its flag with underscores"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    power: int = option("--power", 3, "how strong")
    speed: float | None = option("--speed", None, "how fast")
    name: str = option("--name", "none", "what it is called")
    file: Path | None = option("--file", None, "where it lies")
    quiet: bool = option("--quiet", False, "no noise")
    brakes: bool = option("--no-air-brakes", True, "it cannot stop")
    horn: bool = option("--horn/--no-horn", True, "it blows")
    fuel: Literal["wood", "coal"] = option("--fuel", "wood", "what it burns")
    parts: tuple[str, ...] = option("--part", (), "what it is made of")
    stops: WordList = multi_option("--stops", "where it stops")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cabin:
    seats: int = option("--seats", 0, "how many sit")
    doors: int | None = option("--doors", None, "how many ways in")


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    engine: Engine = Engine()
    cabin: Cabin = Cabin()


def _file(folder: Path, text: str | bytes) -> Path:
    path = folder / "run.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def _refusal(file: Path | None = None, flag_values: dict[str, Any] | None = None, *sets: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(Train, file, flag_values or {}, sets)
    return str(caught.value)


def test_nothing_said_gives_the_defaults() -> None:
    assert load_config(Train, None, {}) == Train()
    assert load_config(Train, None, {"power": None, "quiet": None}) == Train(), "None means not given"


def test_the_later_source_wins(tmp_path: Path) -> None:
    file = _file(tmp_path, "[engine]\npower = 4\nspeed = 1\nname = 'a'\n[cabin]\nseats = 9\n")
    config = load_config(Train, file, {"speed": 2.0, "name": "b"}, ["engine.name=c", "engine.name=d"])
    assert config == Train(engine=Engine(power=4, speed=2.0, name="d"), cabin=Cabin(seats=9))


def test_none_takes_an_optional_value_out_that_the_file_gives(tmp_path: Path) -> None:
    file = _file(tmp_path, "[engine]\nspeed = 2.0\nfile = 'a'\nname = 'b'\n")
    run = load_config(
        Train, file, {"doors": 2}, ["engine.speed=none", "engine.file=none", "cabin.doors=none"]
    )
    assert run == Train(engine=Engine(name="b"))
    assert load_config(Train, file, {}, ["engine.name=none"]).engine.name == "none", (
        "a text that is not optional"
    )
    assert load_config(Train, file, {}, ['engine.file="none"']).engine.file == Path("none")
    assert _refusal(None, None, "engine.power=none").startswith("--set engine.power: has another type")


def test_values_become_the_types_of_their_fields(tmp_path: Path) -> None:
    file = _file(
        tmp_path, "[engine]\nspeed = 3\nfile = 'a/b'\npart = ['x', 'y']\nquiet = true\nfuel = 'coal'"
    )
    config = load_config(Train, file, {}).engine
    assert config == Engine(speed=3.0, file=Path("a/b"), parts=("x", "y"), quiet=True, fuel="coal")
    assert type(config.speed) is float


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("engine.power=7", Engine(power=7)),
        ("engine.power = 7", Engine(power=7)),
        ("engine.speed=1e-3", Engine(speed=1e-3)),
        ("engine.name=bare word", Engine(name="bare word")),
        ('engine.name="quoted"', Engine(name="quoted")),
        ("engine.name=3", Engine(name="3")),
        ("engine.name=2024-01-01", Engine(name="2024-01-01")),
        ("engine.name=a=b", Engine(name="a=b")),
        ("engine.file=/x/y.toml", Engine(file=Path("/x/y.toml"))),
        ("engine.file=17", Engine(file=Path("17"))),
        ("engine.quiet=true", Engine(quiet=True)),
        ('engine.part=["a", "b"]', Engine(parts=("a", "b"))),
        ("engine.fuel=coal", Engine(fuel="coal")),
    ],
)
def test_set_takes_a_value_as_toml_writes_it_and_text_without_quotes(text: str, expected: Engine) -> None:
    assert load_config(Train, None, {}, [text]).engine == expected


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("engine.power", "--set: has no value: found engine.power, wanted SECTION.KEY=VALUE"),
        ("engine.pwer=1", f"--set: engine.pwer: unknown key; {RULE}; did you mean engine.power?"),
        ("power=1", f"--set: power: unknown key; {RULE}; did you mean engine.power?"),
        ("zzzzzzzz.qqqqqqq=1", f"--set: zzzzzzzz.qqqqqqq: unknown key; {RULE}"),
        ("engine.power=1.5", "--set engine.power: has another type: found 1.5, wanted an integer"),
        ("engine.power=true", "--set engine.power: has another type: found True, wanted an integer"),
        ("engine.power=many", "--set engine.power: has another type: found 'many', wanted an integer"),
        ("engine.speed=fast", "--set engine.speed: has another type: found 'fast', wanted a number"),
        ("engine.quiet=1", "--set engine.quiet: has another type: found 1, wanted true or false"),
        ("engine.part=[1]", "--set engine.part: has another type: found [1], wanted a list of strings"),
        ("engine.fuel=oil", "--set engine.fuel: unknown choice: found oil, wanted wood | coal"),
        ("engine.power=" + "9" * 5000, "--set engine.power: has another type"),
    ],
)
def test_a_set_that_means_nothing_is_refused(text: str, line: str) -> None:
    assert _refusal(None, {}, text).startswith(line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[engine]\npwer = 1", f"{{file}}: engine.pwer: unknown key; {RULE}; did you mean engine.power?"),
        ("[engin]\npower = 1", "{file}: [engin]: unknown section; hint: did you mean engine?"),
        ("[cellar]", "{file}: [cellar]: unknown section"),
        ("power = 1", "{file}: power: is outside every section: wanted [section] key = value"),
        ("[engine]\npower = '1'", "{file}: engine.power: has another type: found '1', wanted an integer"),
        ("[engine]\nname = 1", "{file}: engine.name: has another type: found 1, wanted text"),
        ("[engine]\nfile = 1", "{file}: engine.file: has another type: found 1, wanted a path"),
        ("[engine]\nfuel = 'oil'", "{file}: engine.fuel: unknown choice: found oil, wanted wood | coal"),
        ("[engine", "{file}: is not TOML: found "),
        (b"\xff\xfe", "{file}: is not TOML: found "),
        ("[engine]\npower = " + "9" * 5000, "{file}: is not TOML: found "),
    ],
)
def test_a_file_that_means_nothing_is_refused(tmp_path: Path, text: str | bytes, line: str) -> None:
    file = _file(tmp_path, text)
    refusal = _refusal(file)
    assert refusal.startswith(line.format(file=file))
    assert "\n" not in refusal


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert _refusal(tmp_path / "no.toml") == f"--config: no such file: found {tmp_path / 'no.toml'}"
    assert _refusal(tmp_path) == f"--config: no such file: found {tmp_path}"


def test_a_value_of_a_flag_is_checked_under_the_flags_name() -> None:
    assert _refusal(None, {"power": "x"}) == ("--power: has another type: found 'x', wanted an integer")


def test_every_value_has_a_flag_and_a_dotted_name() -> None:
    flags = {key.dotted: key.flag for key in config_keys(Train)}
    assert flags["engine.power"] == "--power"
    assert flags["cabin.doors"] == "--doors"
    assert len(flags) == len(fields(Engine)) + len(fields(Cabin))


def test_a_key_is_its_flag_with_underscores_whatever_the_field_is_called() -> None:
    assert key_of_flag("--micro-batch-size") == "micro_batch_size"
    assert key_of_flag("--override-opt_param-scheduler") == "override_opt_param_scheduler"
    assert key_of_flag("--async-save/--no-async-save") == "async_save"
    assert key_of_flag("--no-data-sharding") == "data_sharding"
    keys = {key.field.name: key.dotted for key in config_keys(Train)}
    assert keys["parts"] == "engine.part"
    assert keys["brakes"] == "engine.air_brakes"
    assert keys["horn"] == "engine.horn"
    assert _refusal(None, None, "engine.parts=a").startswith("--set: engine.parts: unknown key")


@pytest.mark.parametrize("flag", ["--no-air-brakes", "--no-horn"])
def test_a_flag_that_turns_a_default_off_writes_false_under_the_key_without_no(flag: str) -> None:
    key = key_of_flag(flag)
    assert f"{key} = true" in CliRunner().invoke(command, []).output
    off = CliRunner().invoke(command, [flag], catch_exceptions=False).output
    assert f"{key} = false" in off
    assert load_config(Train, None, {}, [f"engine.{key}=false"]) == load_config(Train, None, {key: False})
    assert f"{key} = true" in CliRunner().invoke(command, [flag, "--set", f"engine.{key}=true"]).output


def test_an_unknown_key_names_the_key_of_the_same_flag_or_the_closest() -> None:
    assert _refusal(None, None, "engine.doors=2") == (
        f"--set: engine.doors: unknown key; {RULE}; did you mean cabin.doors?"
    )
    assert _refusal(None, None, "engine.no-air-brakes=1") == (
        f"--set: engine.no-air-brakes: unknown key; {RULE}; did you mean engine.air_brakes?"
    )
    assert _refusal(None, None, "engine.powr=2") == (
        f"--set: engine.powr: unknown key; {RULE}; did you mean engine.power?"
    )
    assert _refusal(None, None, "zzzzzz=2") == f"--set: zzzzzz: unknown key; {RULE}"


@click.command()
@add_flags(Train)
def command(config: Path | None, sets: tuple[str, ...], **options: Any) -> None:
    click.echo(to_toml(load_config(Train, config, options, sets)))


def test_flags_and_file_and_set_arrive_through_a_command(tmp_path: Path) -> None:
    file = _file(tmp_path, "[engine]\npower = 4\nname = 'file'\n")
    argv = ["--config", str(file), "--name", "flag", "--quiet", "--part", "a", "--part", "b"]
    argv += ["--set", "cabin.seats=2", "--fuel", "coal"]
    result = CliRunner().invoke(command, argv, catch_exceptions=False)
    engine = Engine(power=4, name="flag", quiet=True, parts=("a", "b"), fuel="coal")
    assert result.output.strip() == to_toml(Train(engine=engine, cabin=Cabin(seats=2))).strip()


def test_help_tells_every_flag_with_its_default() -> None:
    text = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    for key in config_keys(Train):
        assert key.flag in text
    assert "How strong. [default: 3]" in text
    assert "How many sit. [default: 0]" in text
    assert "How many ways in. [default" not in text
    assert "No noise. [default" not in text


def test_the_closest_word_is_named_and_a_far_one_is_not() -> None:
    assert did_you_mean("layrs", ["heads", "layers"]) == "did you mean layers?"
    assert did_you_mean("zebra", ["heads", "layers"]) == ""


TEXT = st.text(st.characters(blacklist_categories=["Cs"]), max_size=12)
FLOATS = st.floats(allow_nan=False)


@given(
    st.builds(
        Train,
        engine=st.builds(
            Engine,
            power=st.integers(-(1 << 70), 1 << 70),
            speed=st.none() | FLOATS,
            name=TEXT,
            file=st.none() | TEXT.map(Path),
            quiet=st.booleans(),
            brakes=st.booleans(),
            horn=st.booleans(),
            fuel=st.sampled_from(["wood", "coal"]),
            parts=st.lists(TEXT, max_size=3).map(tuple),
        ),
        cabin=st.builds(Cabin, seats=st.integers(), doors=st.none() | st.integers()),
    )
)
def test_a_configuration_reads_back_equal_from_its_toml(
    tmp_path_factory: pytest.TempPathFactory, config: Train
) -> None:
    file = _file(tmp_path_factory.mktemp("toml"), to_toml(config))
    assert load_config(Train, file, {}) == config


def test_toml_leaves_out_what_is_not_set() -> None:
    text = to_toml(replace(Train(), engine=Engine(speed=0.5, parts=("a",))))
    assert text.splitlines() == [
        "[engine]",
        "power = 3",
        "speed = 0.5",
        'name = "none"',
        "quiet = false",
        "air_brakes = true",
        "horn = true",
        'fuel = "wood"',
        'part = ["a"]',
        "",
        "[cabin]",
        "seats = 0",
    ]


def _stops(*args: str) -> Engine:
    seen: list[Train] = []

    @click.command(cls=MultiValueCommand)
    @add_flags(Train)
    def command(config: Path | None, sets: tuple[str, ...], **options: Any) -> None:
        seen.append(load_config(Train, config, options, sets))

    result = CliRunner().invoke(command, list(args), catch_exceptions=False, standalone_mode=False)
    assert result.exception is None
    return seen[0].engine


@pytest.mark.parametrize(
    ("args", "stops"),
    [
        (["--stops", "a", "b", "c"], ("a", "b", "c")),
        (["--stops", "0.3", "a", "--power", "4"], ("0.3", "a")),
        (["--stops", "-1", "a", "-1e3"], ("-1", "a", "-1e3")),
        (["--stops", "-", "a"], ("-", "a")),
        (["--stops=a", "b"], ("a", "b")),
        (["--stops", "a", "b", "--quiet", "--stops", "c"], ("c",)),
        ([], ()),
    ],
)
def test_a_flag_of_several_words_takes_them_up_to_the_next_flag(
    args: list[str], stops: tuple[str, ...]
) -> None:
    parsed_stops = _stops(*args)
    assert parsed_stops.stops == stops
    assert parsed_stops.power == (4 if "--power" in args else 3)
    assert parsed_stops.quiet == ("--quiet" in args)


def test_a_flag_of_several_words_needs_one() -> None:
    with pytest.raises(ConfigError, match="^--stops: needs a value$"):
        _stops("--stops", "--power", "4")


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("engine.stops=a", ("a",)),
        ("engine.stops=1.50", ("1.50",)),
        ('engine.stops=[0.3, "a", 2, "b"]', ("0.3", "a", "2", "b")),
    ],
)
def test_several_words_of_a_file_are_a_list_or_one_text(text: str, stops: tuple[str, ...]) -> None:
    config = load_config(Train, None, {}, [text])
    assert config.engine.stops == stops
    assert "stops" in to_toml(config)


def test_several_words_are_words() -> None:
    line = "--set engine.stops: has another type: found [True], wanted a list of strings"
    assert _refusal(None, {}, "engine.stops=[true]") == line
