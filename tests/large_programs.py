"""Which of the programs that may take a minute to compile are lowered inside a block, for tests."""

import contextlib

import jax

# Of these a program is made for each network, and each may take a minute.
LARGE = {
    "jit(gather_gradients)", "jit(apply_gradients)", "jit(with_policies)", "jit(rollout_norms)",
    "jit(begun)", "jit(decode)", "jit(made)", "jit(admit)", "jit(decode_queue)", "jit(empty_slots)",
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
