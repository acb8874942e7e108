"""All commands speak with one voice: a walk over the whole tree, so that a new command cannot forget it."""

from __future__ import annotations

import io
import json
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from fisherfold import cli
from fisherfold.cli import app, common, main
from fisherfold.cli.voice import Voice
from toy import slow

CLONE = (Path(__file__).parents[2] / "benchmarks").exists()
SHARED = {"as_json", "quiet", "verbose", "debug"}
PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"


def leaves(node, path=("fisherfold",)):
    for name, child in getattr(node, "commands", {}).items():
        if hasattr(child, "commands"):
            yield from leaves(child, (*path, name))
        else:
            yield (*path, name), child


COMMANDS = {" ".join(path): command for path, command in leaves(typer.main.get_command(app))}
each = pytest.mark.parametrize("path", COMMANDS)


def examples(command):
    return re.findall(r"`([^`]+)`", command.epilog)


def test_the_tree_is_the_one_that_is_documented():
    assert len(COMMANDS) >= 19
    if not PAGE.exists():
        pytest.skip("the documentation is not part of an installed package")
    page = PAGE.read_text(encoding="utf-8")
    assert [path for path in COMMANDS if f"`{path}`" not in page] == []


@each
def test_a_command_has_the_shared_options_and_every_option_has_a_help(path):
    parameters = {parameter.name: parameter for parameter in COMMANDS[path].params}
    assert set(parameters) >= SHARED
    assert [name for name, parameter in parameters.items() if not parameter.help] == []
    assert COMMANDS[path].help.strip().endswith(".")


@pytest.mark.slow
@each
def test_the_help_of_a_command_shows_examples_that_can_be_typed(path):
    shown = CliRunner().invoke(app, [*path.split()[1:], "--help"], env={"COLUMNS": "400"})
    assert shown.exit_code == 0
    assert examples(COMMANDS[path])
    for example in examples(COMMANDS[path]):
        assert example in shown.stdout
        assert example.startswith(path)
        words = shlex.split(example)[len(path.split()) :]
        # an option that is misspelt, or a value that does not parse, raises here
        COMMANDS[path].make_context(path, words)


@each
def test_the_help_of_a_command_is_whole_in_a_terminal_of_100_columns(path):
    shown = CliRunner().invoke(app, [*path.split()[1:], "--help"], env={"COLUMNS": "100"})
    assert "…" not in shown.stdout
    assert "<bool>" not in shown.stdout
    for parameter in COMMANDS[path].params:
        assert [
            option
            for option in parameter.opts
            if option.startswith("-") and option not in shown.stdout
        ] == []


@pytest.fixture
def probe(monkeypatch, capsys):
    """A command whose work is given by the test, run through ``main``."""
    work = {}
    tree = common.group("A probe.", examples=["fisherfold probe"])

    @common.command(tree, examples=["fisherfold probe"])
    def run(voice: Voice, seed: int = 0) -> None:
        """Do what the test says."""
        work["do"](voice)

    @common.command(tree, examples=["fisherfold other"])
    def other(voice: Voice) -> None:
        """Make a family of it."""

    def call(do, *options):
        work["do"] = do
        monkeypatch.setattr(cli, "app", tree)
        monkeypatch.setattr(sys, "argv", ["fisherfold", "run", *options])
        with pytest.raises(SystemExit) as end:
            main()
        seen = capsys.readouterr()
        return end.value.code or 0, seen.out, seen.err

    return call


def families(node, path=("fisherfold",)):
    if hasattr(node, "commands"):
        yield path, node
        for name, child in node.commands.items():
            yield from families(child, (*path, name))


def test_every_family_shows_an_example_of_its_own():
    found = dict(families(typer.main.get_command(app)))
    assert len(found) >= 5
    for path, node in found.items():
        shown = CliRunner().invoke(app, [*path[1:], "--help"], env={"COLUMNS": "400"})
        assert shown.exit_code == 0
        for example in examples(node):
            assert example.startswith(" ".join(path))
            assert example in shown.stdout
        assert examples(node)


@pytest.mark.parametrize(
    ("words", "sentence", "path"),
    [
        (["--colour"], "No such option: --colour", "fisherfold run"),
        (["--seed", "x"], "Invalid value for '--seed'", "fisherfold run"),
    ],
)
def test_words_that_do_not_parse_are_told_in_the_same_voice(probe, words, sentence, path):
    code, out, err = probe(lambda _: None, *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {sentence}")
    assert err.splitlines()[1].startswith(f"hint: '{path} --help' shows examples")
    assert sentence in json.loads(probe(lambda _: None, *words, "--json")[2])["error"]
    assert "Traceback" not in probe(lambda _: None, *words, "--debug")[2]


def test_a_family_alone_shows_its_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fisherfold", "datasets"])
    with pytest.raises(SystemExit) as end:
        main()
    seen = capsys.readouterr()
    assert end.value.code == 2
    assert "fisherfold datasets" in seen.out + seen.err
    assert "error:" not in seen.err


def test_a_question_without_an_answer_is_a_no(probe):
    assert probe(fail(typer.Abort())) == (1, "", "stopped: not confirmed\n")


def test_a_warning_is_one_sentence_without_code(probe):
    def work(voice):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("the rows \x1b[31m are few", stacklevel=1)
        voice.answer({}, "done")

    assert probe(work) == (0, "done\n", "warning: the rows ?[31m are few\n")
    assert warnings.showwarning is not common._warn


def test_errors_cannot_speak_to_the_terminal(probe):
    assert (
        probe(fail(ValueError("column \x1b[31m\x07x")))[2].splitlines()[0]
        == "error: column ?[31m?x"
    )


def test_results_and_remarks_cannot_speak_to_the_terminal(probe):
    def work(voice):
        voice.remark("\x1b[31mred")
        voice.answer({}, "caf\udce9\x1b[2J")
        voice.result(
            "\x1b]0;title", {"\x1b[1mname": "\x07bell", "list": ["a\x1b"], "kept": "\xa0é"}
        )

    code, out, err = probe(work)
    assert (code, err) == (0, "?[31mred\n")
    assert out.startswith("caf??[2J\n")
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "\xa0é" in out


def test_a_narrow_table_loses_nothing(probe, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    path = "/".join(["folder"] * 20)
    out = probe(lambda voice: voice.result("Title", {"model": path}))[1]
    assert max(map(len, out.splitlines())) <= 40
    assert "".join(re.findall(r"│[^│]*│ (.*?) *│", out)) == path


def test_json_is_ascii_whatever_standard_output_is(probe):
    facts = {"training R²": 1.0, "file": "caf\udce9.csv"}
    out = probe(lambda voice: voice.result("x", facts), "--json")[1]
    assert out.isascii()
    assert json.loads(out) == facts


def test_a_result_is_printed_where_standard_output_lacks_its_signs(monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["fisherfold", "datasets", "list"])
    monkeypatch.setattr(cli, "app", lambda **_: Voice().result("x", {"±": "R²"}))
    with pytest.raises(SystemExit) as exit_:
        main()
    sys.stdout.flush()
    assert exit_.value.code == 0
    assert b"R?" in printed.getvalue()


def fail(error):
    def do(_):
        raise error

    return do


def test_results_go_to_standard_output_and_remarks_to_standard_error(probe):
    def work(voice):
        voice.remark("a remark [with brackets]")
        voice.detail("a detail")
        voice.result("Title", {"size": 0.123456, "name": "[bold]x[/]"})

    code, out, err = probe(work)
    assert (code, err) == (0, "a remark [with brackets]\n")
    assert "0.1235" in out
    assert "[bold]x[/]" in out
    code, out, err = probe(work, "--quiet", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"size": 0.123456, "name": "[bold]x[/]"}
    _, _, err = probe(work, "--verbose")
    assert re.fullmatch(r"a remark .*\na detail\ntook \d+\.\d s(, \d+ MB at most)?\n", err)


def test_json_has_no_nan(probe):
    _, out, _ = probe(
        lambda voice: voice.result("x", {"a": float("nan"), "b": (1.0, float("inf"))}), "--json"
    )
    assert json.loads(out) == {"a": None, "b": [1.0, None]}


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (ValueError("rank must be at\nleast 1, got [0]"), 2, "rank must be at least 1, got [0]"),
        (FileNotFoundError("there is no file x"), 2, "there is no file x"),
        (RuntimeError("the sky fell"), 1, "unexpected RuntimeError: the sky fell"),
        (KeyError("deep"), 1, "unexpected KeyError: 'deep'"),
    ],
)
def test_an_error_is_one_sentence_a_hint_and_an_exit_code(probe, error, code, sentence):
    seen, out, err = probe(fail(error))
    first, hint = err.splitlines()
    assert (seen, out, first) == (code, "", f"error: {sentence}")
    assert hint.startswith("hint: ")
    assert "--debug" in hint
    seen, out, err = probe(fail(error), "--json")
    assert (seen, out) == (code, "")
    assert json.loads(err)["error"] == sentence
    assert json.loads(err)["exit_code"] == code


def test_the_hint_names_the_command(probe):
    assert "'fisherfold run --help' shows examples" in probe(fail(ValueError("no")))[2]


def test_debug_shows_the_trace(monkeypatch, tmp_path):
    monkeypatch.setattr(
        sys, "argv", ["fisherfold", "complete", "recommend", str(tmp_path / "no"), "1", "--debug"]
    )
    with pytest.raises(FileNotFoundError, match="there is no model folder"):
        main()


def test_an_interrupt_says_how_to_go_on(probe):
    def work(voice):
        voice.resume = "what was finished is kept. To go on:\n  fisherfold probe"
        raise KeyboardInterrupt

    assert probe(work) == (
        130,
        "",
        "stopped; what was finished is kept. To go on:\n  fisherfold probe\n",
    )
    code, _, err = probe(fail(KeyboardInterrupt()), "--quiet")
    assert (code, err) == (130, "stopped; no file was changed; the same command starts again\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_end_stops_like_an_interrupt(probe, number, code):
    cleaned = []

    def work(voice):
        voice.resume = "the same command goes on"
        try:
            signal.raise_signal(number)
        finally:
            cleaned.append(number)

    assert probe(work) == (code, "", "stopped; the same command goes on\n")
    assert cleaned == [number]
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_signal_that_is_ignored_stays_so_and_torchrun_keeps_its_own(probe, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert probe(lambda _: signal.raise_signal(signal.SIGHUP))[0] == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    seen = []
    monkeypatch.setenv("RANK", "1")
    probe(lambda _: seen.append(signal.getsignal(signal.SIGTERM)))
    assert seen == [signal.SIG_DFL]


def test_an_interrupt_before_a_command_is_under_way_is_no_refusal(monkeypatch, capsys):
    abort = typer.Abort()
    abort.__cause__ = KeyboardInterrupt()
    monkeypatch.setattr(cli, "app", lambda **_: fail(abort)(None))
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    assert "confirmed" not in capsys.readouterr().err


@pytest.mark.parametrize("delay", [0.1, *slow(0.03, 0.3, 1.0)])
def test_an_interrupt_at_the_start_shows_no_trace(delay):
    words = [sys.executable, "-m", "fisherfold", "datasets", "verify"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    # Python and the package's own first lines have a few milliseconds before __main__ takes the signal
    assert "fisherfold/cli" not in errors


def test_quiet_and_verbose_exclude_each_other(probe):
    code, _, err = probe(lambda _: None, "--quiet", "--verbose")
    assert code == 2
    assert "--quiet and --verbose exclude each other" in err


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["datasets", "info", "mov"], {"movielens100k", "movielens1m"}),
        (["reproduce", "theory", "--part", "m"], {"metric"}),
        (["complete", "fit", "--offsets", "r"], {"rows"}),
        (["sub"], {"subspace"}),
    ],
)
def test_the_shell_completes_commands_and_values(words, offered):
    line = " ".join(["fisherfold", *words])
    environment = {
        "_FISHERFOLD_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words)),
    }
    shown = CliRunner().invoke(app, [], env=environment, prog_name="fisherfold")
    assert set(shown.stdout.split()) == offered


@pytest.fixture
def school(tmp_path, monkeypatch):
    """A data folder with a school set of 8 small tasks."""
    g = np.random.default_rng(0)
    arrays = {
        "x": g.integers(0, 3, (96, 28)).astype(np.uint8),
        "y": g.integers(1, 70, 96).astype(np.uint8),
        "task_start": np.arange(0, 96, 12, dtype=np.int32),
        "train_idx": np.zeros((10, 2), np.uint16),
        "train_fold": np.ones((10, 2), np.uint8),
    }
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "school.npz", **arrays)
    monkeypatch.setenv("FISHERFOLD_DATA", str(tmp_path / "data"))
    return tmp_path


@pytest.fixture
def workplace(school, monkeypatch):
    """Files for every command, and the two experiments without data kept short."""
    from fisherfold.reproduce import reproduce

    g = np.random.default_rng(0)
    monkeypatch.chdir(school)
    monkeypatch.setenv("FISHERFOLD_CACHE", str(school / "cache"))
    ratings = [
        f"u{i},{j},{g.normal():.3f}" for i in range(12) for j in range(8) if g.random() < 0.8
    ]
    Path("ratings.csv").write_text("\n".join(["user,item,rating", *ratings]), encoding="utf-8")
    rows = [f"{'ab'[i % 2]},{x:.3f},{x * (1 + i % 2):.3f}" for i, x in enumerate(g.normal(size=40))]
    Path("tasks.csv").write_text("\n".join(["task,x,y", *rows]), encoding="utf-8")
    monkeypatch.setattr(reproduce, "NAMES", ("school", "sarcos"))
    return school


# what to type after the name of each command, and the exit code; a new command needs its line here
RUNS = {
    "fisherfold serve": ("missing", 2),
    "fisherfold demo": ("--data nowhere", 2),
    "fisherfold info": ("", 0),
    "fisherfold datasets list": ("", 0),
    "fisherfold datasets info": ("school", 0),
    "fisherfold datasets fetch": ("school", 0),
    "fisherfold datasets verify": ("school", 2),
    "fisherfold complete fit": ("ratings.csv --rank 1 -o model", 0),
    "fisherfold complete predict": ("model ratings.csv -o out.csv", 0),
    "fisherfold complete recommend": ("model u1 -k 2", 0),
    "fisherfold complete similar": ("model 1 -k 2", 0),
    "fisherfold complete explain": ("model u1 1", 0),
    "fisherfold complete update": ("model ratings.csv -o model", 0),
    "fisherfold complete export": ("model -o slim", 0),
    "fisherfold complete evaluate": ("ratings.csv --rank 1 --folds 2", 0),
    "fisherfold subspace fit": ("tasks.csv --target y --task task --rank 1 -o tasks", 0),
    "fisherfold subspace predict": ("tasks tasks.csv -o out.csv", 0),
    "fisherfold subspace evaluate": ("tasks tasks.csv", 0),
    "fisherfold reproduce all": ("--quick --seeds 1", 0),
    "fisherfold reproduce school": ("--quick --seeds 1", 0),
    "fisherfold reproduce jester": ("--quick", 2),
    "fisherfold reproduce movielens": ("--quick", 2),
    "fisherfold reproduce sarcos": ("--quick", 2),
    "fisherfold reproduce cifar": ("--results nowhere", 2),
    "fisherfold reproduce theory": ("--quick --seeds 1 --part invariance", 0 if CLONE else 2),
}


def test_every_command_answers_in_json_alone(workplace, monkeypatch, capsys):
    assert set(COMMANDS) == set(RUNS)
    for path, (rest, code) in RUNS.items():
        monkeypatch.setattr(sys, "argv", [*path.split(), *rest.split(), "--json", "--quiet"])
        with pytest.raises(SystemExit) as end:
            main()
        seen = capsys.readouterr()
        assert (end.value.code or 0) == code, (path, seen.err)
        loud, silent = (seen.out, seen.err) if code == 0 else (seen.err, seen.out)
        assert isinstance(json.loads(loud), dict), path
        assert silent == "", path
