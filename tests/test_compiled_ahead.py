"""What is compiled ahead, side by side, is what is called: nothing of its kind is compiled again."""

import contextlib
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_harness import one_layer_policy, rows, small_config
from tiny import tiny_adapter, tiny_model

from qerl_jax import compiled
from qerl_jax.compiled import compiled_programs, compiled_together
from qerl_jax.config_files import load_config
from qerl_jax.models.params import norms_of
from qerl_jax.rl import trainer
from qerl_jax.rollout import Engine, Prompts, SamplingSettings

# Of these a program is made for each network, and each may take a minute.
LARGE = {
    "jit(update_step)", "jit(with_policies)", "jit(rollout_norms)",
    "jit(begun)", "jit(decode)", "jit(made)", "jit(admit)", "jit(decode_queue)",
}  # fmt: skip


@contextlib.contextmanager
def large_programs():
    """The names of the large programs that are lowered inside, in order. Each is, also where it is kept with a run."""
    found = []

    def listen(event, seconds, **more):
        if event.endswith("jaxpr_to_mlir_module_duration") and more.get("fun_name") in LARGE:
            found.append(more["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    ("slots", "noisy", "expected"),
    [(None, True, ["jit(begun)", "jit(decode)"]), (4, False, ["jit(admit)", "jit(decode_queue)", "jit(made)"])],
)
def test_a_rollout_finds_its_programs(slots, noisy, expected):
    jax.clear_caches()
    model = tiny_model()
    adapter = tiny_adapter(model)
    engine = Engine(model, SamplingSettings(6, (1,), 0), max_prompt_length=5, max_slots=slots)
    norms = jax.jit(lambda norms: jax.tree.map(jnp.copy, norms))(norms_of(model, adapter)) if noisy else None
    with large_programs() as ahead:
        compiled_together(engine.lowered(adapter, 3, jax.random.key(0), 4, norms))
    assert sorted(ahead) == expected
    prompts = Prompts(np.full((3, 5), 2, np.int32), np.array([5, 1, 3], np.int32), np.arange(3, dtype=np.int32))
    with large_programs() as later:
        out = engine.rollout(adapter, prompts, jax.random.key(7), 4, norms)
    assert out.tokens.shape == (12, 6) and later == []


@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer": {"max_steps": 4}, "grpo": {"num_iterations": 1, "beta": 0.1}}],
)
def test_a_run_compiles_nothing_large_after_its_start(tmp_path, monkeypatch, options):
    """From the start and continued from a checkpoint, whose arrays are others."""
    policy = one_layer_policy(tmp_path / "policy")
    config = str(small_config(tmp_path, policy, **({"optimizer": {"max_steps": 4}} | options)))
    compile_ahead, later = trainer._Run._compile, []

    def watched(run):
        compile_ahead(run)
        later.append(stack.enter_context(large_programs()))

    monkeypatch.setattr(trainer._Run, "_compile", watched)
    monkeypatch.setattr(trainer._Run, "_stop_if_interrupted", functools.partialmethod(stop_once, at=2, done=[]))
    with contextlib.ExitStack() as stack, pytest.raises(KeyboardInterrupt):
        trainer.train(load_config(config))
    jax.clear_caches()
    with contextlib.ExitStack() as stack:
        trainer.train(load_config(config))
    assert later == [[], []]
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]


def stop_once(run, *, at, done):
    if not done and int(run.state.step) >= at:
        run._save()
        done.append(True)
        raise KeyboardInterrupt


def test_programs_that_are_kept_are_read_one_by_one(no_cache, tmp_path, monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(compiled, "_in_threads", lambda: True)

    def program(number):
        def f(x):
            for i in range(60):
                x = jnp.sin(x @ x + i + number)
            return x

        return jax.jit(f).lower(np.ones((8, 8), np.float32))  # no other program is made, which might be kept too

    threads = {"cache_hits": [], "backend_compile_duration": []}

    def listen(event, *_, **more):
        if (name := event.split("/")[-1]) in threads and more.get("fun_name") in (None, "jit(f)"):
            threads[name].append(threading.current_thread() is threading.main_thread())

    jax.monitoring.register_event_listener(listen)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for hits, numbers in ((0, range(3)), (3, range(3)), (0, range(3, 6))):
            for found in threads.values():
                found.clear()
            jax.clear_caches()
            with compiled_programs(tmp_path / "kept"):
                (group,) = compiled_together(map(program, numbers))
            assert len(group) == 3 and threads["cache_hits"] == [True] * hits
            in_main = bool(hits) or numbers[0] > 0  # by their name all of these may be kept
            assert threads["backend_compile_duration"] == [in_main] * 3
    finally:
        jax.monitoring.unregister_event_listener(listen)
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("in_threads", [False, True])
def test_the_first_error_is_raised_and_ends_the_rest(monkeypatch, in_threads):
    monkeypatch.setattr(compiled, "_in_threads", lambda: in_threads)

    def lowered():
        yield jax.jit(lambda x: x + 1).lower(jnp.zeros(3))
        raise ValueError("cannot be traced")

    with pytest.raises(ValueError, match="cannot be traced"):
        compiled_together(lowered())
    assert [len(group) for group in compiled_together([], [jax.jit(lambda x: x + 2).lower(jnp.zeros(3))])] == [0, 1]
