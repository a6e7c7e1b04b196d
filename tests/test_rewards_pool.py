"""A user's reward functions in their own processes: errors come back, deadlines are hard, the pool goes on."""

import contextlib
import os
import resource
import select
import signal
import time
import types

import pytest

from qerl_jax.errors import UserError
from qerl_jax.rewards import pool
from qerl_jax.rewards.loading import parse_name
from qerl_jax.rewards.pool import Worker

# What a folder may hold beside a user's rewards; the worker, and what it imports, need Python's own.
NAMESAKES = ("math", "random", "types")
SOURCE = """
import os, subprocess, sys, threading, time

print("this goes to stderr, not into the answers")

def length(prompts, completions, completion_ids, answer):
    print("so does this")
    return [len(completion) + int(a) for completion, a in zip(completions, answer)]

def sometimes(completions, **columns):
    if completions[0] == "raise":
        raise KeyError("no such thing")
    if completions[0] == "exit":
        sys.exit("enough")
    if completions[0] == "die":
        os._exit(3)
    if completions[0] == "killed":
        os.kill(os.getpid(), 9)
    if completions[0] == "hang":
        subprocess.Popen(["sh", "-c", f"sleep 2; touch {__file__}.survived"])
        time.sleep(60)
    if completions[0] == "orphan":
        subprocess.Popen(["sleep", "30"])
        os.kill(os.getpid(), 9)
    if completions[0] == "nan":
        return [float("nan")]
    if completions[0] == "server":
        subprocess.Popen(["sh", "-c", f"sleep 4; touch {__file__}.served"])
    if completions[0] == "thread":
        threading.Thread(target=time.sleep, args=(60,)).start()
    if completions[0] == "pid":
        return [os.getpid()]
    return [1.0]
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def sometimes(source):
    worker = Worker(parse_name(f"{source}:sometimes"), timeout=0.5)
    yield lambda completion: score(worker, completion)
    worker.close()


def score(worker, completion):
    worker.submit(["p"], [completion], [[1]], {"answer": ["1"]})
    return worker.result()


def test_a_process_with_a_thousand_open_files(source):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2048, hard)), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        worker = Worker(parse_name(f"{source}:sometimes"), timeout=5)
        assert score(worker, "fine") == [1.0]
        worker.close()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_scores_come_back_and_prints_stay_out(source, capfd):
    worker = Worker(parse_name(f"{source}:length"), timeout=30)
    worker.submit(["p", "p"], ["ab", "abc"], [[1], [2]], {"answer": ["1", "2"]})
    assert worker.result() == [3.0, 5.0]
    large = "x" * 1_000_000
    worker.submit(["p"] * 4, [large] * 4, [list(range(1000))] * 4, {"answer": ["0"] * 4})
    assert worker.result() == [1e6] * 4
    worker.close()
    captured = capfd.readouterr()
    assert captured.out == "" and "so does this" in captured.err


def test_what_is_printed_before_a_hang_is_there(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    source = "import time\n\ndef f(**columns):\n    print('asking the judge')\n    time.sleep(60)\n"
    (tmp_path / "mine.py").write_text(source)
    worker = Worker(parse_name(f"{tmp_path}/mine.py:f"), timeout=0.5)
    with contextlib.closing(worker), pytest.raises(UserError, match=r"took longer than 0\.5 s"):
        score(worker, "c")
    assert "asking the judge" in capfd.readouterr().err


def test_prints_that_nobody_reads_are_no_mistake_of_the_function(tmp_path):
    (tmp_path / "mine.py").write_text("def f(**columns):\n    print('x' * 100_000, flush=True)\n    return [4.0]\n")
    kept, (reader, writer) = os.dup(2), os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    try:
        worker = Worker(parse_name(f"{tmp_path}/mine.py:f"), timeout=10)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(writer)
    try:
        assert score(worker, "fine") == [4.0]
    finally:
        worker.close()


def test_an_exception_comes_back_with_the_users_traceback_only(sometimes):
    with pytest.raises(UserError, match="raised on 1 completion, of the prompt that begins 'p'") as caught:
        sometimes("raise")
    message = str(caught.value)
    assert "KeyError: 'no such thing'" in message and "mine.py" in message and "calling.py" not in message
    assert sometimes("fine") == [1.0]


@pytest.mark.parametrize("at_work", [False, True])
def test_a_worker_whose_parent_is_gone_ends_whatever_threads_are_left(source, at_work):
    worker = Worker(parse_name(f"{source}:sometimes"), timeout=5)
    assert score(worker, "thread") == [1.0]
    process = worker._process
    if at_work:
        worker.submit(["p"], ["thread"], [[1]], {"answer": ["1"]})
    process.stdout.close()
    process.stdin.close()
    assert process.wait(30) == -signal.SIGKILL
    worker.close()


def test_what_a_worker_has_started_ends_with_it_once_its_parent_is_gone(source):
    worker = Worker(parse_name(f"{source}:sometimes"), timeout=5)
    assert score(worker, "server") == [1.0]
    worker._process.stdout.close()
    worker._process.stdin.close()
    assert worker._process.wait(30) == 0
    time.sleep(5)
    assert not os.path.exists(f"{source}.served")
    worker.close()


@pytest.mark.parametrize("told", [False, True])
def test_a_worker_whose_parent_dies_at_its_start_says_nothing(tmp_path, monkeypatch, capfd, told):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(0.5)\n\ndef score(completions):\n    return []\n")
    if not told:  # before the name of the function was sent
        monkeypatch.setattr(Worker, "_send", lambda *_: None)
    worker = Worker(parse_name(f"{tmp_path / 'slow.py'}:score"), timeout=5)
    process = worker._process
    process.stdout.close()
    process.stdin.close()
    assert process.wait(30) == 0
    worker.close()
    assert capfd.readouterr().err == ""


def test_sys_exit_is_an_exception_like_others(sometimes):
    with pytest.raises(UserError, match="SystemExit: enough"):
        sometimes("exit")
    assert sometimes("fine") == [1.0]


@pytest.mark.parametrize(("way", "message"), [("die", "with exit code 3"), ("killed", "by SIGKILL")])
def test_a_dead_process_is_reported_and_replaced(sometimes, way, message):
    with pytest.raises(UserError, match=f"its process ended {message} on 1 completion, of"):
        sometimes(way)
    assert sometimes("fine") == [1.0]


def test_a_process_that_died_between_calls_is_not_laid_to_the_next_ones_completions(sometimes):
    (pid,) = map(int, sometimes("pid"))
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    with pytest.raises(UserError, match=r"its process ended by SIGKILL while it waited for the next call$"):
        sometimes("fine")
    assert sometimes("fine") == [1.0]


def test_a_dead_process_is_reported_at_once_though_what_it_started_holds_its_pipe(source):
    worker = Worker(parse_name(f"{source}:sometimes"), timeout=60)
    began = time.monotonic()
    with pytest.raises(UserError, match="its process ended by SIGKILL on 1 completion, of"):
        score(worker, "orphan")
    assert time.monotonic() - began < 20
    worker.close()


def test_nan_names_function_and_prompt(sometimes):
    with pytest.raises(UserError, match=r"sometimes' returned nan .* of the prompt that begins 'p'"):
        sometimes("nan")
    assert sometimes("fine") == [1.0]


def test_a_hanging_call_is_killed_at_its_deadline_with_its_children(sometimes, source):
    began = time.monotonic()
    with pytest.raises(
        UserError, match=r"(?s)took longer than 0.5 s \(reward.timeout\) on 1 completion, of.*mine.py.* in sometimes"
    ) as caught:
        sometimes("hang")
    assert "0:00" not in str(caught.value)
    assert time.monotonic() - began < 3
    assert sometimes("fine") == [1.0]
    time.sleep(max(0, began + 3 - time.monotonic()))
    assert not os.path.exists(f"{source}.survived")


@pytest.mark.parametrize(("ending", "line"), [
    ("finally:\n        pass", "line 5, in judged"), ("except:\n        return 0.0", "line 11, in f")
])  # fmt: skip
def test_a_coroutine_that_hangs_is_told_by_its_own_lines(tmp_path, ending, line):
    (tmp_path / "mine.py").write_text(
        f"import asyncio\n\nasync def judged(_):\n    try:\n        await asyncio.sleep(60)\n    {ending}\n\n\n"
        "async def f(completions, **columns):\n    return await asyncio.gather(*map(judged, completions))\n"
    )
    worker = Worker(parse_name(f"{tmp_path}/mine.py:f"), timeout=0.5)
    with contextlib.closing(worker), pytest.raises(UserError, match=r"took longer than 0\.5 s .*on 1 comp") as caught:
        score(worker, "c")
    assert f'mine.py", {line}' in str(caught.value) and "calling.py" not in str(caught.value)


def test_a_process_that_ignores_its_own_watchdog_is_killed_from_outside(source, monkeypatch):
    """A stopped process runs no watchdog either."""
    monkeypatch.setattr(pool, "_GRACE", 0.3)
    worker = Worker(parse_name(f"{source}:sometimes"), timeout=0.5)
    (pid,) = score(worker, "pid")
    os.kill(int(pid), 19)  # SIGSTOP
    with pytest.raises(UserError, match=r"took longer than 0.5 s .*; its process was killed"):
        score(worker, "fine")
    assert score(worker, "fine") == [1.0]
    worker.close()


def test_a_module_that_cannot_be_imported(tmp_path):
    (tmp_path / "broken.py").write_text("def f(:\n")
    worker = Worker(parse_name(f"{tmp_path}/broken.py:f"), timeout=1)
    with pytest.raises(UserError, match=r"(?s)raised while it was imported.*SyntaxError"):
        worker.ready()
    worker.close()


def test_a_module_whose_import_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "LOAD_TIMEOUT", 0.3)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    worker = Worker(parse_name(f"{tmp_path}/slow.py:f"), timeout=60)
    with pytest.raises(UserError, match=r"took longer than 0\.3 s while it was imported"):
        worker.ready()
    worker.close()


def test_a_missing_function_is_told_at_the_start(source):
    worker = Worker(parse_name(f"{source}:lenght"), timeout=1)
    with pytest.raises(UserError, match="did you mean 'length'"):
        worker.ready()
    worker.close()


@pytest.mark.parametrize("wrong", ["", "    1 / 0\n"])
def test_what_is_written_when_a_program_exits_is_written_where_a_call_failed_too(tmp_path, wrong):
    (tmp_path / "mine.py").write_text(
        "import atexit, time\n\nlog = open(__file__ + '.log', 'w')\n"
        f"atexit.register(time.sleep, 0.5)\n\ndef f(**columns):\n    log.write('judged')\n{wrong}    return [1.0]\n"
    )
    with contextlib.closing(Worker(parse_name(f"{tmp_path}/mine.py:f"), timeout=10)) as worker:
        with pytest.raises(UserError, match="ZeroDivisionError") if wrong else contextlib.nullcontext():
            score(worker, "c")
        worker.cancel()
    assert (tmp_path / "mine.py.log").read_text() == "judged"


def test_closing_ends_the_process(source):
    worker = Worker(parse_name(f"{source}:sometimes"), timeout=5)
    (pid,) = score(worker, "pid")
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def scored(spec):
    worker = Worker(parse_name(spec), 10.0)
    try:
        return score(worker, "c")
    finally:
        worker.close()


def test_a_file_finds_what_lies_beside_it_from_any_folder(tmp_path, monkeypatch):
    """Before what lies in the current folder, each file its own, and behind Python's."""
    for folder, found in (("here", 1), ("one", 2), ("two", 3)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "beside.py").write_text(f"found = {found}\n")
        (tmp_path / folder / "random.py").write_text("")
    (tmp_path / "here/only_here.py").write_text("found = 10\n")
    source = "import beside, only_here, random\n\ndef f(**columns):\n"
    source += "    random.random()\n    return [beside.found + only_here.found]\n"
    (tmp_path / "one/mine.py").write_text(source)
    (tmp_path / "two/mine.py").write_text(source)
    (tmp_path / "here/link.py").symlink_to(tmp_path / "two/mine.py")
    monkeypatch.chdir(tmp_path / "here")
    specs = ("../one/mine.py:f", f"{tmp_path}/two/mine.py:f", "link.py:f")
    assert [scored(spec) for spec in specs] == [[12.0], [13.0], [13.0]]


@pytest.mark.parametrize("folder", ["plain", "2026-11-28T09:20:00"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_file_may_use_processes(tmp_path, folder, method):
    """Those of `spawn` and `forkserver` import what they are to do by its name."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "beside.py").write_text("found = 4\n")
    (tmp_path / folder / "mine.py").write_text(
        "import multiprocessing\nfrom concurrent.futures import ProcessPoolExecutor\n\nimport beside\n\n"
        "def one(completion):\n    return len(completion) + beside.found\n\n"
        "def f(completions, **columns):\n"
        f"    context = multiprocessing.get_context({method!r})\n"
        "    with ProcessPoolExecutor(2, mp_context=context) as pool:\n"
        "        return list(pool.map(one, completions))\n"
    )
    assert scored(f"{tmp_path}/{folder}/mine.py:f") == [5.0]


@pytest.mark.parametrize(("end", "code"), [
    ("sys.exit()", 0), ("sys.exit(3)", 3), ("sys.exit('no')", 1), ("1 / 0", 1)
])  # fmt: skip
def test_a_forked_process_ends_as_in_any_program(tmp_path, end, code):
    (tmp_path / "mine.py").write_text(
        f"import os, sys\n\ndef f(**columns):\n    child = os.fork()\n    if child == 0:\n        {end}\n"
        "    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]\n"
    )
    assert scored(f"{tmp_path}/mine.py:f") == [code]


@pytest.mark.parametrize("own", [None, "", "/where/mine/is"])
def test_programs_that_a_function_starts_get_the_users_search_path(tmp_path, monkeypatch, own):
    if own is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", own)
    (tmp_path / "mine.py").write_text(
        "import subprocess\n\ndef f(**columns):\n"
        "    shown = subprocess.run(['/bin/sh', '-c', 'echo \"${PYTHONPATH-none}\"'], capture_output=True, text=True)\n"
        f"    return [shown.stdout.strip() == {'none' if own is None else own!r}]\n"
    )
    assert scored(f"{tmp_path}/mine.py:f") == [1.0]


def test_files_in_the_current_folder_do_not_replace_pythons_modules(tmp_path, monkeypatch):
    for name in NAMESAKES:
        (tmp_path / f"{name}.py").write_text(
            "def score(completions, **columns):\n    return [2.0] * len(completions)\n"
        )
    (tmp_path / "mine.py").write_text("def score(completions, **columns):\n    return [3.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    for spec, expected in (("math.py:score", 2.0), ("mine:score", 3.0)):
        worker = Worker(parse_name(spec), 10.0)
        try:
            worker.submit(["p"], ["c"], [[1]], {})
            assert worker.result() == [expected]
        finally:
            worker.close()


@pytest.mark.parametrize("starts", [
    "from qerl_jax.rl.trainer import train\ntrain(None)",
    "from qerl_jax.rewards.loading import parse_name\nfrom qerl_jax.rewards.pool import Worker\n"
    "Worker(parse_name(f'{__file__}:zero'), 5.0)",
])  # fmt: skip
def test_a_script_that_starts_a_run_when_it_is_imported_starts_no_chain_of_them(tmp_path, starts):
    script = tmp_path / "script.py"
    script.write_text(f"def zero(prompts, completions, **_):\n    return [0.0] * len(completions)\n\n\n{starts}\n")
    with contextlib.closing(Worker(parse_name(f"{script}:zero"), timeout=5.0)) as worker:
        with pytest.raises(
            UserError, match=r"script.py:zero': its file starts a run.*under `if __name__ == '__main__'"
        ):
            worker.ready()
        guarded = starts.replace("\n", "\n    ")
        script.write_text(script.read_text().replace(starts, f"if __name__ == '__main__':\n    {guarded}"))
        worker.ready()


def test_what_was_being_scored_while_the_job_was_suspended_is_scored_again(tmp_path, monkeypatch):
    source, calls = tmp_path / "slow.py", tmp_path / "calls"
    source.write_text(
        "import time\n\n\ndef slow(prompts, completions, **_):\n"
        f"    open({str(calls)!r}, 'a').write('x')\n    time.sleep(1)\n    return [3.0] * len(completions)\n"
    )
    calls.touch()
    ahead, suspended_in = [0.0], {1}  # seconds of the clock, and the calls during which a look takes a minute

    class Poll:
        def __init__(self):
            self._poll = select.poll()
            self.register = self._poll.register

        def poll(self, milliseconds):
            found = self._poll.poll(milliseconds)
            if not found and (call := len(calls.read_text())) in suspended_in:
                suspended_in.remove(call)
                ahead[0] += 60.0
            return found

    with contextlib.closing(Worker(parse_name(f"{source}:slow"), timeout=5.0)) as worker:
        polls = types.SimpleNamespace(poll=Poll, POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)
        monkeypatch.setattr(pool, "select", polls)
        monkeypatch.setattr(pool, "_newest_standstill", 0.0)  # which is not left in the future
        monkeypatch.setattr(pool, "time", types.SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0]))
        worker.submit(["a"], ["xyz"], [[1]], {})
        assert worker.result() == [3.0] and calls.read_text() == "xx"
        suspended_in |= {3, 4}  # again while it is scored again
        worker.submit(["a"], ["xyz"], [[1]], {})
        with pytest.raises(UserError, match=r"slow' took longer than 5 s"):
            worker.result()
        worker.submit(["a"], ["xyz"], [[1]], {})
        assert worker.result() == [3.0] and not suspended_in
