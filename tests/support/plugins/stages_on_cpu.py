"""A plugin for vLLM, for tests alone: pipeline stages on the CPU, eager.

vLLM 0.29 and 0.32 make the buffer in which a later stage takes over what the stage before has computed in a warm-up that their
CPU worker leaves out under ``--enforce-eager``, and end at the first request (``assert self.intermediate_tensors is not None``),
with any connector and with none. Here the buffer is made when it is first wanted, as the warm-up makes it. vLLM's processes find
this by the folder beside it when this directory is on PYTHONPATH; ``STAGES_ON_CPU`` turns it on.
"""

from __future__ import annotations

import os


def register() -> None:
    """Wrap vLLM's runner. Calling it again does nothing."""
    if not os.environ.get("STAGES_ON_CPU"):
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    gather = GPUModelRunner.sync_and_gather_intermediate_tensors
    if gather.__name__ == "made_first":
        return

    def made_first(self, *args, **kwargs):
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *args, **kwargs)

    GPUModelRunner.sync_and_gather_intermediate_tensors = made_first
