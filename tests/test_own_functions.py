"""Functions of a user's own are known by their source and what they read, and are the same in every process."""

import functools
import linecache
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from qerl_jax.config import Config, GrpoOptions, OptimizerOptions
from qerl_jax.errors import UserError
from qerl_jax.rl.losses import LossSpec, policy_loss
from qerl_jax.rl.own_functions import OwnFunctions
from qerl_jax.run_folder import NO_OWN_FUNCTIONS

SOURCE = """
import dataclasses
import enum
import functools
from typing import NamedTuple
import jax
import jax.numpy as jnp
import numpy as np
import optax

BOUND, TABLE = 1.2, jnp.arange(3.0)
CHOSEN, STEPS, KIND = {1, 2}, range(4), enum.Enum("Kind", "A B").A
LATER = object()

def helper(x):
    return x * 2

def of(scale):
    def loss(logp, old_logp, ref_logp, advantages, mask):
        def inner(x):
            return jnp.minimum(helper(x), BOUND) * scale + TABLE[0]
        return -jnp.sum(inner(logp)), {}
    return loss

def logged(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

plain, bound, jitted = of(1.0), functools.partial(of(1.0), mask=None), jax.jit(of(1.0))
wrapped = logged(of(1.0))

@jax.custom_vjp
def scaled(x):
    return x

scaled.defvjp(lambda x: (x, x), lambda x, dy: (dy * 7,))

def chosen(logp, *_):
    return scaled(jnp.sum(logp)) * len(CHOSEN) * len(STEPS) * (KIND.name == "A"), {}

mapped = jax.vmap(chosen)

def unknown(logp, *_):
    return LATER, {}

class Base:
    _LOW = 0.8

class Clip(Base):
    HIGH = 0.28

    @staticmethod
    def of(x):
        return x * 5

    def __call__(self, x):
        return x

    @staticmethod
    @jax.jit
    def fast(x):
        return x - 21

    @functools.cached_property
    def third(self):
        return 1 / 33

    @property
    def half(self):
        return 0.5 * HALF

HALF = 1.0

@dataclasses.dataclass(frozen=True)
class Weigh:
    by: float

    def __call__(self, x):
        return x * self.by + 9

    def method(self, logp, *_):
        return jnp.sum(logp) * self.by, {}

class Level(enum.Enum):
    FIRST = 11

class Pair(NamedTuple):
    one: float = 3.0

WEIGH = Weigh(1.5)

def classes(logp, *_):
    return Clip.of(jnp.sum(logp)) * Clip.HIGH + WEIGH(0) * Level.FIRST.value * Pair().one, {}

METHOD = WEIGH.method

def by_method(logp, *_):
    return METHOD(logp)

RISES = optax.join_schedules([optax.constant_schedule(2.5), optax.linear_schedule(0.0, 1.0, 45)], [55])
CURVE = np.poly1d([6.5, 0.0])

def scheduled(logp, *_):
    return jnp.sum(logp) * RISES(3) * CURVE(2.0), {}

def first(x):
    return x - 61

PAIRS = {first: 1.0, "rest": 2.0}

def paired(logp, *_):
    return sum(by for of, by in PAIRS.items()), {}

CALLED = Clip()

def called(logp, *_):
    return CALLED(jnp.sum(logp)), {}
"""


def digest(folder, source=SOURCE, name="plain"):
    file = folder / "mine.py"
    file.write_text(source)
    scope = {"__name__": "mine"}
    exec(compile(source, file, "exec"), scope)
    return OwnFunctions(scope[name]).identity()["loss function"]


def test_where_there_are_none_they_are_as_configured():
    assert OwnFunctions().identity() == NO_OWN_FUNCTIONS
    assert OwnFunctions(advantage_fn=jax.nn.relu).identity()["loss function"] == "as configured"


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("plain", "-jnp.sum", "jnp.sum"),
        ("plain", "x * 2", "x * 3"),  # what it calls
        ("plain", "BOUND, TABLE = 1.2", "BOUND, TABLE = 1.3"),  # what it reads
        ("plain", "arange(3.0)", "arange(4.0)"),
        ("plain", "plain, bound, jitted = of(1.0)", "plain, bound, jitted = of(2.0)"),  # what it closes over
        ("bound", "mask=None", "mask=1"),
        ("jitted", "x * 2", "x * 3"),
        ("wrapped", "return function(*args)", "return function(*args[::-1])"),
        ("wrapped", "x * 2", "x * 3"),
        ("chosen", "{1, 2}", "{1, 3}"),
        ("chosen", "range(4)", "range(5)"),
        ("chosen", '"A B").A', '"A B").B'),
        ("chosen", "dy * 7", "dy * 8"),  # the rule of its gradient
        ("mapped", "{1, 2}", "{1, 3}"),
        ("classes", "HIGH = 0.28", "HIGH = 5.0"),
        ("classes", "_LOW = 0.8", "_LOW = 0.7"),
        ("classes", "x * 5", "x * 6"),  # of a static method
        ("classes", "HALF = 1.0", "HALF = 2.0"),  # what a property reads
        ("classes", "x - 21", "x - 22"),
        ("classes", "1 / 33", "1 / 34"),
        ("classes", "self.by + 9", "self.by + 8"),
        ("classes", "Weigh(1.5)", "Weigh(1.6)"),
        ("classes", "FIRST = 11", "FIRST = 12"),
        ("classes", "one: float = 3.0", "one: float = 4.0"),
        ("by_method", "jnp.sum(logp) * self.by", "jnp.sum(logp) - self.by"),
        ("by_method", "Weigh(1.5)", "Weigh(1.6)"),
        ("scheduled", "constant_schedule(2.5)", "constant_schedule(3.5)"),  # what another module's function holds
        ("scheduled", "1.0, 45)", "1.0, 46)"),
        ("scheduled", "[55]", "[56]"),
        ("scheduled", "[6.5, 0.0]", "[6.5, 0.5]"),  # and another module's object
        ("paired", "x - 61", "x - 62"),  # a key
        ("paired", '"rest": 2.0', '"last": 2.0'),
    ],
)
def test_a_change_of_what_a_function_does_is_known(tmp_path, name, before, after):
    assert SOURCE.count(before) == 1
    assert digest(tmp_path, name=name) != digest(tmp_path, SOURCE.replace(before, after), name)
    moved = f"import os\n# Elsewhere.\n{SOURCE}\nOTHER = 7\n"
    assert digest(tmp_path, name=name) == digest(tmp_path, moved, name)


@pytest.mark.parametrize("name", ["<python-input-3>", "<ipython-input-3-0a1b2c>", "<string>"])
def test_a_method_that_was_typed_in_is_read(name):
    """In a shell, whose names of what was typed look like those of what a dataclass has generated."""

    def typed(source):
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        scope = {"__name__": "mine"}
        exec(compile(source, name, "exec"), scope)
        return [OwnFunctions(scope[loss]).identity()["loss function"] for loss in ("classes", "called_by_field")]

    source = SOURCE + "\ndef called_by_field(logp, *_):\n    return WEIGH(logp), {}\n"
    try:
        before = typed(source)
        assert typed(source) == before
        assert typed(source.replace("x * 5", "x * 6"))[0] != before[0]  # of a static method
        changed = typed(source.replace("self.by + 9", "self.by + 8"))
        assert changed[0] != before[0] and changed[1] != before[1]
    finally:
        linecache.cache.pop(name)


def test_an_attribute_is_no_global_of_its_name(tmp_path):
    source = f"{SOURCE}\nlog = LATER\n\ndef logs(logp, *_):\n    return (lambda x: jnp.log(x))(logp), {{}}\n"
    assert digest(tmp_path, source, "logs") == digest(tmp_path, source.replace("log = LATER", "log = 2"), "logs")
    inner = "    def inner(x):\n        class Inner:\n            by = log\n        return x * Inner.by\n"
    with pytest.raises(UserError, match="logs reads <object"):
        digest(tmp_path, source.replace("    return (lambda", f"{inner}    return (lambda"), "logs")


def test_functions_of_other_modules_are_known_by_what_is_bound_to_them():
    of = [
        OwnFunctions(functools.partial(policy_loss, spec)).identity()["loss function"]
        for spec in (LossSpec(), LossSpec(), LossSpec(epsilon=0.1))
    ]
    assert of[0] == of[1] != of[2] and of[0].startswith("policy_loss, sha256 ")


def test_it_is_the_same_in_another_process():
    code = (
        "import functools; from qerl_jax.rl.losses import *; from qerl_jax.rl.own_functions import OwnFunctions;"
        "print(OwnFunctions(functools.partial(policy_loss, LossSpec())).identity()['loss function'])"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    here = OwnFunctions(functools.partial(policy_loss, LossSpec())).identity()["loss function"]
    assert done.stdout.strip() == here


def test_the_order_of_a_set_is_no_part_of_a_function(tmp_path):
    """That of functions is by where they lie in memory; these two call one helper."""

    class InOrder(set):
        def __iter__(self):
            return iter(sorted(super().__iter__(), key=lambda f: f.__name__, reverse=self.reverse))

    chosen = "def first(x):\n    return helper(x)\n\ndef second(x):\n    return helper(x)\n\n"
    source = SOURCE.replace("def of(scale)", f"{chosen}def of(scale)")
    found = []
    for InOrder.reverse in (False, True):
        file = tmp_path / "mine.py"
        file.write_text(source)
        scope = {"__name__": "mine"}
        exec(compile(source, file, "exec"), scope)
        scope["CHOSEN"] = InOrder({scope["first"], scope["second"]})
        found.append(OwnFunctions(scope["chosen"]).identity()["loss function"])
    assert found[0] == found[1]


def test_what_cannot_be_known_again_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"the loss function unknown reads <object .*; expected numbers, texts"):
        digest(tmp_path, name="unknown")
    with pytest.raises(UserError, match=r"the loss function called reads <mine.Clip object"):
        digest(tmp_path, name="called")
    endless = SOURCE.replace("LATER = object()", "LATER = []\nLATER.append(LATER)")
    with pytest.raises(UserError, match="unknown reads something that holds itself"):
        digest(tmp_path, endless, "unknown")

    def early(logp, *_):
        return later, {}

    before = OwnFunctions(early).identity()  # to which nothing is bound yet
    later = 2.0
    assert before != OwnFunctions(early).identity()


def test_options_that_it_takes_the_place_of_are_named(caplog):
    grpo = GrpoOptions(loss_type="grpo", epsilon=0.1, top_entropy_quantile=0.2, scale_rewards="batch")
    config = Config(optimizer=OptimizerOptions(max_steps=10), grpo=grpo)
    OwnFunctions(policy_loss).warn_of_options(config)
    assert caplog.messages == ["loss_fn takes the place of grpo.loss_type, grpo.epsilon, grpo.top_entropy_quantile"]
    OwnFunctions(advantage_fn=jax.nn.relu).warn_of_options(config)
    assert caplog.messages[1:] == ["advantage_fn takes the place of grpo.scale_rewards"]


def test_what_has_no_source_is_refused():
    with pytest.raises(
        UserError, match=r"the loss function is 7; expected a function of Python's, or functools.partial"
    ):
        OwnFunctions(7).identity()
    with pytest.raises(UserError, match=r"the advantage function is <built-in function sum>; expected"):
        OwnFunctions(None, sum).identity()
    scope = {}
    exec(compile("def typed(rewards):\n    return rewards", "<no file>", "exec"), scope)
    with pytest.raises(UserError, match=r"typed has no source to read, .*; write it into a file"):
        OwnFunctions(advantage_fn=scope["typed"]).identity()
