"""What is compiled ahead, side by side, is what is called: nothing of its kind is compiled again."""

import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from large_programs import large_programs
from tiny import tiny_adapter, tiny_model

from qerl_jax import compiled
from qerl_jax.compiled import compiled_programs, compiled_together
from qerl_jax.models.params import norms_of
from qerl_jax.rollout import Engine, Prompts, Request, SamplingSettings

QUEUED = ["jit(admit)", "jit(decode_queue)", "jit(empty_slots)", "jit(made)"]


@pytest.mark.parametrize(
    ("slots", "noisy", "expected"),
    [(None, True, ["jit(begun)", "jit(decode)"]), (4, False, QUEUED)],
)
def test_a_rollout_finds_its_programs(slots, noisy, expected):
    jax.clear_caches()
    model = tiny_model(layers=1)
    adapter = tiny_adapter(model)
    engine = Engine(model, SamplingSettings(6, (1,), 0), max_prompt_length=5, max_slots=slots)
    norms = jax.jit(lambda norms: jax.tree.map(jnp.copy, norms))(norms_of(model, adapter)) if noisy else None
    with large_programs() as ahead:
        (made,) = compiled_together(engine.lowered(adapter, 3, jax.random.key(0), 4, norms))
    assert sorted(ahead) == expected and len(made) == len(expected)
    prompts = Prompts(np.full((3, 5), 2, np.int32), np.array([5, 1, 3], np.int32), np.arange(3, dtype=np.int32))
    with large_programs() as later:
        out = engine.rollout(adapter, prompts, jax.random.key(7), 4, norms)
    assert out.tokens.shape == (12, 6) and later == []


@pytest.mark.parametrize("every", [None, 8])
def test_requests_find_their_programs(every):
    jax.clear_caches()
    model = tiny_model(layers=1)
    adapter = tiny_adapter(model)
    engine = Engine(model, SamplingSettings(6, (1,), 0), max_prompt_length=5, max_slots=4, tail_sizes=())
    requests = [Request([2, 3, 4], 3, 0), Request([2], 2, 1)]
    with large_programs() as ahead:
        (made,) = compiled_together(engine.lowered_requests(adapter, requests, jax.random.key(0)))
    assert sorted(ahead) == QUEUED and len(made) == len(QUEUED)
    with large_programs() as later:
        done = list(engine.generate(adapter, requests, jax.random.key(0), until=lambda ids: None, every=every))
    assert sum(one.finish_reason is not None for one in done) == 5 and later == []


def test_programs_that_are_kept_are_read_one_by_one(no_cache, tmp_path, monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(compiled, "_in_threads", lambda: True)

    def program(number):
        def f(x):
            for i in range(400):
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


def test_each_kernel_begins_once_and_before_the_programs_that_have_it(monkeypatch):
    """As on a GPU. A CPU has no kernels: programs stand for them."""
    monkeypatch.setattr(compiled, "_in_threads", lambda: True)
    monkeypatch.setattr(compiled, "_kept_names", lambda: {"jit_three": True, "jit_mosaic_b": True}.get)
    monkeypatch.setattr(compiled, "mosaic_kernels", lambda program: kernels[program.name])
    monkeypatch.setattr(compiled, "alone", lambda name, told: Program(name))
    kernels = {
        "one": {"mosaic_a": {}, "mosaic_b": {}},
        "two": {"mosaic_a": {}, "mosaic_c": {}},
        "three": {"mosaic_d": {}},
    }
    begun, in_main, lock = [], set(), threading.Lock()

    class Program:
        def __init__(self, name):
            self.name = name

        def compile(self):
            with lock:
                begun.append(self.name)
                if threading.current_thread() is threading.main_thread():
                    in_main.add(self.name)
            return self.name

    monkeypatch.setattr(compiled, "_module_name", lambda program: f"jit_{program.name}")
    monkeypatch.setattr(compiled.os, "cpu_count", lambda: 1)
    groups = compiled_together(map(Program, ("one", "two")), [Program("three")])
    assert groups == [["one", "two"], ["three"]]
    # A program that may be kept is left to the end, and its kernels to it.
    assert set(begun[:3]) == {"mosaic_a", "mosaic_b", "one"} and begun[3:] == ["mosaic_c", "two", "three"]
    assert in_main == {"mosaic_b", "three"}


def test_a_kernel_that_does_not_compile_is_raised(no_cache, monkeypatch):
    monkeypatch.setattr(compiled, "_in_threads", lambda: True)
    monkeypatch.setattr(compiled, "mosaic_kernels", lambda program: {"mosaic_a": {}})
    monkeypatch.setattr(compiled, "alone", lambda name, told: types.SimpleNamespace(compile=lambda: 1 / 0))
    monkeypatch.setattr(compiled, "_module_name", lambda program: "jit_kernel")
    with pytest.raises(ZeroDivisionError):
        compiled_together([jax.jit(lambda x: x + 3).lower(jnp.zeros(3))])
