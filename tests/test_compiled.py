"""Compiled programs stay with their run; torn ones are made again."""

import jax
import jax.numpy as jnp
import pytest

from qerl_jax.compiled import compiled_programs, remove_torn


def _compile(number):
    """Compiles a program of its own, large enough to be kept."""

    def f(x):
        for i in range(400):
            x = jnp.sin(x @ x + i + number)
        return x

    jax.jit(f)(jnp.ones((8, 8))).block_until_ready()


def test_each_folder_gets_its_own_programs(no_cache, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "earlier"))
    _compile(0)
    jax.config.update("jax_compilation_cache_dir", None)
    for number in (1, 2):
        with compiled_programs(tmp_path / str(number)):
            _compile(number)
    _compile(3)
    first, second = ({path.name for path in (tmp_path / n).glob("jit_f-*")} for n in "12")
    assert len(first) == len(second) == 1
    assert first != second
    assert jax.config.jax_compilation_cache_dir is None


def test_a_folder_that_is_moved_is_not_made_again(no_cache, tmp_path):
    run = tmp_path / "run"
    with compiled_programs(run / "compiled"):
        run.rename(tmp_path / "moved")
        with pytest.warns(UserWarning, match="Error writing persistent compilation cache entry"):
            _compile(5)
    assert (tmp_path / "moved/compiled").is_dir() and not run.exists()


def test_a_torn_program_is_written_again(no_cache, tmp_path):
    with compiled_programs(tmp_path):
        _compile(4)
    [program] = tmp_path.glob("jit_f-*-cache")
    whole = program.read_bytes()
    for torn in (whole[: len(whole) // 2], b""):
        program.write_bytes(torn)
        remove_torn(tmp_path)
        assert not program.exists()
    program.write_bytes(whole[:-3])
    jax.clear_caches()
    with compiled_programs(tmp_path):
        _compile(4)
    assert len(program.read_bytes()) == pytest.approx(len(whole), rel=0.05)
    remove_torn(tmp_path)
    assert program.exists()


@pytest.mark.parametrize("frame", [
    "28b52ffd 20 05 290000 68656c6c6f",  # "hello"
    "28b52ffd 04 00 000000 120000 2e 010000 6f6ab00c",  # "..", between two blocks without bytes; with a checksum
])  # fmt: skip
def test_a_program_in_zstd_is_torn_until_its_last_byte(tmp_path, frame):
    """As JAX writes them where Python is 3.14 or newer, or the package zstandard is installed."""
    program, whole = tmp_path / "jit_f-1-cache", bytes.fromhex(frame)
    for length in range(len(whole) + 1):
        program.write_bytes(whole[:length])
        remove_torn(tmp_path)
        assert program.exists() == (length == len(whole))


def test_a_cache_of_the_users_own_is_left_alone(no_cache, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    with compiled_programs(tmp_path / "run"):
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
