"""Mistakes on the command line: each is refused with a reason, before any work, and with what to type instead."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from rich.console import Console

import weft
from weft.cli import main, names, screen
from weft.cli.figures import Figures
from weft.cli.screen import Steps
from weft.lab.commands import chosen
from weft.lab.families import WORKLOADS, for_op

# Every command that takes `--op`, with its other required arguments.
WITH_OP = {
    "verify": ["verify"],
    "prove": ["prove"],
    "bench": ["bench"],
    "bench rows": ["bench", "rows"],
    "audit": ["audit"],
    "tune": ["tune"],
    "aot build": ["aot", "build", "--target", "sm_90", "--out", os.devnull],
}
WITH_FILTER = {"traffic": ["report", "traffic"], "published": ["report", "published"]}


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the message of a command that is refused; argparse exits by itself."""
    try:
        code = main(argv)
    except SystemExit as end:
        code = int(str(end.code))
    captured = capsys.readouterr()
    assert code == 2, captured
    assert captured.out == ""
    return captured.err


# ---- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("norm", ["norm"]),
        ("rms_norm", ["norm_backward", "norm"]),
        ("clip_grads_", ["multi_tensor_reduce", "multi_tensor_clip"]),
        ("linear_cross_entropy", ["linear_logprobs_backward", "linear_statistics", "linear_logprobs"]),
    ],
)
def test_public_names_stand_for_the_ops_they_call(name: str, ops: list[str]) -> None:
    assert names.ops_named(name) == ops


@pytest.mark.parametrize("command", WITH_OP)
def test_every_command_takes_the_public_name_of_an_op(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--op rms_norm` is understood: the refusal concerns the workload, and its message names the ops."""
    said = refused([*WITH_OP[command], "--op", "rms_norm", "--workload", "zzz"], capsys)
    assert said.startswith("no workload of norm_backward, norm has 'zzz' in its name")


def test_ops_of_a_program_are_not_among_those_that_commands_take_by_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They have no workloads."""
    assert weft.pointwise(lambda x: x + 1).op.name in weft.catalogue
    assert "Weft has no kernels for mps" in refused(["tune", "--device", "mps"], capsys)


@pytest.mark.parametrize("command", WITH_OP)
def test_an_unknown_op_is_refused_with_the_nearest_names(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused([*WITH_OP[command], "--op", "RMSNorm"], capsys)
    assert re.fullmatch(r"there is no op 'RMSNorm'\. Did you mean 'rms_norm'.*\?\n", said)
    assert len(said) < 100


def test_an_op_like_no_other_is_refused_with_the_public_names_on_short_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = refused(["verify", "--op", "zzz"], capsys)
    assert all(name in said for name in names.public_ops())
    assert "norm_backward" not in said
    assert max(map(len, said.splitlines())) <= 100


def test_a_function_without_kernels_is_not_an_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert "weft.merge_attention has no kernels" in refused(["audit", "--op", "merge_attention"], capsys)


@pytest.mark.parametrize("command", {**WITH_OP, **WITH_FILTER})
def test_an_unknown_workload_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown workload must not yield an empty table with the exit code of success."""
    if command in WITH_FILTER:
        said = refused([*WITH_FILTER[command], "zzz"], capsys)
    else:
        said = refused([*WITH_OP[command], "--workload", "zzz"], capsys)
    assert "'zzz'" in said
    assert max(map(len, said.splitlines())) <= 100


@pytest.mark.parametrize(
    ("text", "near"),
    [("lamma3-8b", "llama3-8b"), ("deepseek_v3", "deepseek-v3"), ("norm_backwards", "norm_backward")],
)
def test_a_misspelled_workload_is_refused_with_the_nearest(text: str, near: str) -> None:
    with pytest.raises(screen.Refused, match=f"Did you mean .*'{near}'"):
        chosen.workloads_named([text])


def test_repeated_workload_options_accumulate() -> None:
    """Every `--workload` counts, not just the last one."""
    first, second = for_op("rope")[0], for_op("norm")[0]
    assert set(chosen.workloads_named([str(first), str(second)])) == {first, second}
    assert set(chosen.workloads_named(["llama3-8b", "deepseek-v3"])) == {
        w for w in WORKLOADS if "llama3-8b" in str(w) or "deepseek-v3" in str(w)
    }
    with pytest.raises(screen.Refused, match="'zzz'"):
        chosen.workloads_named(["llama3-8b", "zzz"])


def test_a_full_name_selects_one_workload() -> None:
    """A full name is one workload even if it is part of another, as norm is of gated_norm and 8 of 8192."""
    every = [str(workload) for workload in WORKLOADS]
    contained = [name for name in every if any(name in other and name != other for other in every)]
    assert contained, "no name contains another"
    for name in contained:
        assert [str(workload) for workload in chosen.workloads_named([name])] == [name]


def test_filters_accept_public_names() -> None:
    ops = {workload.op for workload in chosen.workloads_named(["rms_norm"])}
    assert ops == {"norm", "norm_backward"}


# ---- values and paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["bench", "--rounds", "0"], "argument --rounds: must be at least 2; got 0"),
        (["bench", "--rounds", "1"], "argument --rounds: must be at least 2; got 1"),
        (["bench", "--most", "-1"], "argument --most: must be above 0 and finite; got -1"),
        (["bench", "--against", "eagre"], "there is no contender 'eagre'. Did you mean 'eager'"),
        (["bench", "--device", "gpu"], "gpu"),
        (["bench", "plot", "{0}/report.json", "{0}/x.txt"], "a picture must end in .pdf, .png, .svg"),
        (["bench", "--plot", "{0}/x.txt"], "a picture must end in .pdf, .png, .svg"),
        (["tune", "--most", "nan"], "argument --most: must be above 0 and finite; got nan"),
        (["tune", "--device", "mps"], "Weft has no kernels for mps"),
        (["audit", "--workers", "0"], "argument --workers: must be at least 1; got 0"),
        (["audit", "--timeout", "0"], "argument --timeout: must be above 0 and finite; got 0"),
        (["prove", "--regions", "0"], "argument --regions: must be at least 1; got 0"),
        (["prove", "--workers", "-3"], "argument --workers: must be at least 1; got -3"),
        (["report", "traffic", "--most", "0"], "argument --most: must be above 0 and finite; got 0"),
        (["report", "traffic", "--target", "h100"], "argument --target: invalid choice: 'h100'"),
        (["bench", "norm"], "`weft bench` measures ops by option: weft bench --op norm"),
        (["bench", "rms_norm"], "weft bench --op rms_norm"),
        (["bench", "row"], "there is no measurement 'row'. Did you mean 'rows'?"),
        (["bench", "mm", "--op", "norm"], "--op and --workload select among ops; `weft bench mm` has none"),
        (["bench", "show", "/nonexistent"], "/nonexistent cannot be read: No such file or directory"),
        (["bench", "show", "{0}/text.json"], "{0}/text.json is no report: it is not JSON"),
        (["bench", "show", "{0}/prove.json"], "prove.json is a report of `weft prove`, which is not read here"),
        (["bench", "show", "{0}/old.json"], "old.json has the schema 1, this Weft reads 2: run `weft bench` again"),
        (["report", "evidence", "{0}/text.json"], "{0}/text.json is no report: it is not JSON"),
        (["report", "evidence", "{0}/list.json"], "{0}/list.json is no report of Weft's"),
        (["report", "evidence", "/nonexistent.md"], "/nonexistent.md: No such file or directory"),
        (["prove", "--against", "{0}/old.json"], "old.json is a report of `weft bench`, which is not read here"),
        (["verify", "rms_norm"], "unrecognized arguments: rms_norm: select an op with `--op rms_norm`"),
        (["doctor", "norm"], "unrecognized arguments: norm\n"),
        (["audit", "--opp"], "unrecognized arguments: --opp"),
        (["verify", "--check", "acuracy"], "there is no check 'acuracy'. Did you mean 'accuracy'?"),
    ],
)  # fmt: skip
def test_invalid_values_are_refused(
    argv: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.lab.bench.require", lambda command: None)  # matplotlib may be missing
    for name, text in (
        ("text", "not JSON"),
        ("list", "[]"),
        ("prove", '{"report": "weft prove", "schema": 1}'),
        ("old", '{"report": "weft bench", "schema": 1}'),
    ):
        (tmp_path / f"{name}.json").write_text(text)
    assert said.format(tmp_path) in refused([argument.format(tmp_path) for argument in argv], capsys)


@pytest.mark.parametrize("option", ["--out", "--plot"])
@pytest.mark.parametrize("command", WITH_OP)
def test_an_unwritable_file_is_refused_before_the_work(
    command: str, option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The refusal comes before the work, not after it."""
    argv = [argument for argument in WITH_OP[command] if argument not in ("--out", os.devnull)]
    if option == "--plot" and command not in ("bench", "bench rows", "audit"):
        pytest.skip("the command draws nothing")
    (tmp_path / "file").touch()
    for path, said in (
        ("/nonexistent/x.svg", f"argument {option}: directory /nonexistent does not exist; create it first"),
        (str(tmp_path), f"argument {option}: {tmp_path} is a directory; name a file"),
        (f"{tmp_path}/file/x.svg", f"directory {tmp_path}/file does not exist"),
        ("/proc/x.svg", "/proc/x.svg cannot be written"),
    ):
        assert said in refused([*argv, option, path], capsys)
    assert not list(tmp_path.glob("*.svg"))


def test_a_writable_file_is_untouched_until_the_end(tmp_path: Path) -> None:
    from weft.cli.arguments import output_file

    (old := tmp_path / "old.json").write_text("{}")
    assert output_file(str(old)) == old
    assert old.read_text() == "{}"
    assert output_file(str(tmp_path / "new.json")) == tmp_path / "new.json"
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]


# ---- Ctrl-C -------------------------------------------------------------------------------------------------

STUCK = """
import argparse, ctypes, sys
import weft.cli
from weft.cli import doctor

def run(args):
    print("begun", flush=True)
    {stuck}

doctor.run = run
raise SystemExit(weft.cli.main(["doctor"]))
"""


def interrupted(command: list[str], after: str = "", seconds: float = 0.0) -> tuple[int, str, float]:
    """Interrupt a command once it has printed something, or some time after its start, and return its exit code, stderr
    and the time it took to end. Its processes are identified by a variable, and none may remain."""
    mark = f"interrupted-{os.getpid()}-{time.monotonic_ns()}"
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "WEFT_QUIET": "1", "WEFT_TEST_MARK": mark, "WEFT_CHOICES": tempfile.gettempdir()},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job of a shell ignores it
    )  # fmt: skip
    assert process.stdout is not None
    if after:
        assert process.stdout.readline() == after
    time.sleep(seconds)
    assert process.poll() is None, process.communicate()
    begin = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, said = process.communicate(timeout=60)
    duration = time.monotonic() - begin
    assert_ended(mark, 5)
    return process.returncode, said, duration


def marked(mark: str) -> list[int]:
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (
                mark.encode() in (entry / "environ").read_bytes()
                and "Z" not in (entry / "stat").read_text().split()[2]
            ):
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids


def assert_ended(mark: str, seconds: float) -> None:
    """Assert that no process with this mark is left after some time, and kill any that is."""
    deadline = time.monotonic() + seconds
    while (remaining := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in remaining:
        os.kill(pid, signal.SIGKILL)
    assert not remaining, "processes of the command remain"


@pytest.mark.slow
def test_a_killed_command_leaves_no_solver() -> None:
    """A solver does not notice by itself that nobody waits for it any more."""
    mark = f"killed-{os.getpid()}-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "weft", "prove", "--op", "sum_rows", "--regions", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "WEFT_TEST_MARK": mark})
    deadline = time.monotonic() + 60
    while len(marked(mark)) < 4 and time.monotonic() < deadline:  # the command, two servers and a solver
        time.sleep(0.2)
    process.kill()
    process.wait()
    assert_ended(mark, 10)


@pytest.mark.parametrize(
    "stuck",
    [
        "import time; time.sleep(60)",
        "ctypes.PyDLL(None).usleep(100); ctypes.CDLL(None).sleep(60)",
        "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); time.sleep(60)",
    ],
    ids=["python", "c", "thread"],
)
def test_ctrl_c_ends_a_command_in_one_line(stuck: str) -> None:
    """Commands also end that compute outside Python, or have a thread that Python waits for on exit. Users wait a
    second; the limit here suits a busy machine."""
    code, said, took = interrupted([sys.executable, "-c", STUCK.format(stuck=stuck)], after="begun\n")
    assert (code, said) == (130, "interrupted\n")
    assert took < 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        ["verify"],
        ["prove"],
        ["prove", "--workers", "1", "--workload", "attention_backward:llama3-8b"],
        ["bench"],
        ["audit", "--workers", "2"],
        ["tune"],
        ["tune", "--target", "sm_90"],
        ["report", "traffic"],
        ["report", "published"],
        ["aot", "build", "--target", "sm_90", "--out", os.devnull],
        ["aot", "build", "--target", "cpu", "--out", os.devnull],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("seconds", [8, 20])
def test_ctrl_c_ends_every_command_with_its_workers(argv: list[str], seconds: float) -> None:
    code, said, took = interrupted([sys.executable, "-m", "weft", *argv], seconds=seconds)
    assert (code, said) == (130, "interrupted\n")
    assert took < 10


# ---- progress -----------------------------------------------------------------------------------------------


def test_progress_is_printed_in_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log must show that a long command is alive."""
    monkeypatch.delenv("WEFT_QUIET", raising=False)
    monkeypatch.setattr(Steps, "FIRST", 0.05)
    monkeypatch.setattr(Steps, "LONGEST", 0.05)
    with Steps(3) as steps:
        steps.say("[red]1 failed[/], norm: accuracy")
        steps.advance()
        said = ""
        deadline = time.monotonic() + 30
        while said.count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
            said += capsys.readouterr().err
    assert re.fullmatch(r"(weft: 1 of 3 done, 0 s: 1 failed, norm: accuracy\n)+", said)


def test_progress_is_quiet_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEFT_QUIET", "1")
    monkeypatch.setattr(Steps, "FIRST", 0.01)
    with Steps(3):
        time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_short_commands_print_no_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WEFT_QUIET", raising=False)
    with Steps(3):
        time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_a_long_text_leaves_the_bar_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    console = Console(file=shown, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr(screen, "Console", lambda **_: console)
    with Steps(3) as steps:
        steps.say("qkv_prepare_quantized:qwen3-30b-a3b/attention:half-mx-both-and-more:8192" * 2)
        steps.advance()
        assert steps._bar is not None
        steps._bar.refresh()
    frames = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue()).replace("\r", "\n").splitlines()
    bar_lines = [line for line in frames if "qkv" in line]
    assert bar_lines
    for line in bar_lines:
        assert len(line) <= 80
        assert "1/3" in line or "0/3" in line


# ---- tables -------------------------------------------------------------------------------------------------


def shown(figures: Figures, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(figures)
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize(
    "names", [("op", "cross_entropy_statistics"), ("workload", "qkv_prepare:linghe/qkv:half:8192")]
)
def test_tables_neither_fold_names_nor_cut_figures(width: int, names: tuple[str, str]) -> None:
    headings = [f"heading {number}" for number in range(9)]
    figures = [f"{number}1.234" for number in range(9)]
    lines = shown(Figures([[names[0], *headings], [names[1], *figures]]), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for part in (*names, *headings, *figures):
        assert part in text, part
    assert "…" not in text
    assert (len(lines) == 2) == (width == 200)


def test_figures_align_with_their_headings() -> None:
    for name in ("a", "b" * 40):
        lines = shown(Figures([["name", "first", "second"], [name, "1", "22"]]), 44)
        above, below = (line for line in lines if "first" in line or "22" in line)
        assert above.index("second") + len("second") == len(below)
        assert below.endswith("22")


def test_every_command_uses_this_table_for_figures() -> None:
    """Tables of rich fold names and cut figures in a narrow terminal; only the doctor has words in its columns."""
    package = Path(screen.__file__).parent
    users = {
        path.name for path in package.rglob("*.py") if re.search(r"plain_table\(|Table\(", path.read_text())
    }
    assert users == {"screen.py", "doctor.py"}


def test_interrupts_are_handled_only_in_the_main_thread() -> None:
    """If a program calls `main` on another thread, the signal stays its own."""
    import threading

    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(main(["aot", "inspect", "/nonexistent"])))
    thread.start()
    thread.join()
    assert codes == [1]
