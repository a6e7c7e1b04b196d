"""Training runs on one layer of the shipped policy."""

import jax
import pytest
from run_harness import one_layer_policy
from training_runs import config_in, train

from qerl_jax.rl import trainer


@pytest.fixture(scope="module", autouse=True)
def programs():
    """The folder of compiled programs, shared with runs that are processes of their own: JAX's usual precision, and
    short compilations are kept too."""
    changed = {"jax_default_matmul_precision": None, "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in changed}
    for name, value in changed.items():
        jax.config.update(name, value)
    yield jax.config.jax_compilation_cache_dir
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr(trainer, "plot_runs", lambda *_: [])


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return one_layer_policy(tmp_path_factory.mktemp("policy") / "one-layer")


@pytest.fixture(scope="module")
def config(policy, tmp_path_factory):
    """3 rollouts with 2 updates each, a save after each, each in another stage of the noise."""
    return config_in(tmp_path_factory.mktemp("config"), policy)


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    """A run of `config` that nothing disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "plot_runs", lambda *_: [])
        return train(config, tmp_path_factory.mktemp("finished") / "run")
