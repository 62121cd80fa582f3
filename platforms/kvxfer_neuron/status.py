"""What libnrt's return codes mean, and what to do about them.

Names and values: aws-neuron-sdk, src/libnrt/include/nrt/nrt_status.h and its page of the documentation, as of SDK 2.32.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Status(IntEnum):
    """NRT_STATUS."""

    SUCCESS = 0
    FAILURE = 1
    INVALID = 2
    INVALID_HANDLE = 3
    RESOURCE = 4
    TIMEOUT = 5
    HW_ERROR = 6
    QUEUE_FULL = 7
    LOAD_NOT_ENOUGH_NC = 9
    UNSUPPORTED_NEFF_VERSION = 10
    FAIL_HOST_MEM_ALLOC = 11
    UNINITIALIZED = 13
    CLOSED = 14
    QUEUE_EMPTY = 15
    EXEC_UNIT_UNRECOVERABLE = 101
    EXEC_BAD_INPUT = 1002
    EXEC_COMPLETED_WITH_NUM_ERR = 1003
    EXEC_COMPLETED_WITH_ERR = 1004
    EXEC_NC_BUSY = 1005
    EXEC_OOB = 1006
    COLL_PENDING = 1100
    EXEC_HW_ERR_COLLECTIVES = 1200
    EXEC_HW_ERR_HBM_UE = 1201
    EXEC_HW_ERR_NC_UE = 1202
    EXEC_HW_ERR_DMA_ABORT = 1203
    EXEC_SW_NQ_OVERFLOW = 1204
    EXEC_HW_ERR_REPAIRABLE_HBM_UE = 1205
    NETWORK_PROXY_FAILURE = 1206


_HARDWARE: Final = (
    "the device is broken or was reset: look at `dmesg` and `neuron-top`, and replace the instance if it comes again"
)
_EXECUTION: Final = "work on the device failed: the engine's log has the cause, and the process must be started again"

_CURES: Final = {
    Status.FAILURE: "libnrt's own log on stderr has the cause (NEURON_RT_LOG_LEVEL=INFO shows more)",
    Status.INVALID: "libnrt refuses an argument: its log on stderr says which (NEURON_RT_LOG_LEVEL=INFO shows more)",
    Status.INVALID_HANDLE: "libnrt does not know what was asked about: its memory was freed, or belongs to another process",
    Status.RESOURCE: "libnrt has no room for it: free HBM (a smaller --gpu-memory-utilization), or look at its log on stderr",
    Status.TIMEOUT: "the device did not answer in time: look at `neuron-top` for a process that holds it",
    Status.HW_ERROR: _HARDWARE,
    Status.QUEUE_FULL: "too much work is queued: set NEURON_RT_XU_COMPUTE_MAX_QUEUED_REQUESTS=63 before the runtime starts",
    Status.LOAD_NOT_ENOUGH_NC: "too few NeuronCores are free: set NEURON_RT_VISIBLE_CORES to cores that no other process holds",
    Status.UNSUPPORTED_NEFF_VERSION: "the model was compiled for another Neuron SDK: compile it with the installed one",
    Status.FAIL_HOST_MEM_ALLOC: "the host has no memory for it: its page cache may be full of a checkpoint's pages",
    Status.UNINITIALIZED: (
        "the Neuron runtime has not been initialised in this process: let the first tensor be made on the device "
        "(vllm-neuron's worker does so in init_device) before kvxfer asks"
    ),
    Status.CLOSED: "the Neuron runtime of this process was closed (nrt_close): start the process again",
    Status.EXEC_NC_BUSY: "another process holds the NeuronCore: `neuron-ls` names it; set NEURON_RT_VISIBLE_CORES to free cores",
    Status.EXEC_UNIT_UNRECOVERABLE: _HARDWARE,
    Status.EXEC_HW_ERR_COLLECTIVES: _HARDWARE,
    Status.EXEC_HW_ERR_HBM_UE: _HARDWARE,
    Status.EXEC_HW_ERR_NC_UE: _HARDWARE,
    Status.EXEC_HW_ERR_DMA_ABORT: _HARDWARE,
    Status.EXEC_HW_ERR_REPAIRABLE_HBM_UE: _HARDWARE,
    Status.NETWORK_PROXY_FAILURE: "the network between Neuron devices failed: check EFA and the security group of the instances",
}


def named(value: int) -> str:
    """Name a code as the header does: ``NRT_RESOURCE (4)``."""
    try:
        return f"NRT_{Status(value).name} ({value})"
    except ValueError:
        return f"NRT_STATUS {value}, which this kvxfer does not know"


def cure(value: int) -> str:
    """Say what to do about a code where nothing more particular is known."""
    try:
        return _CURES.get(Status(value), _EXECUTION)
    except ValueError:
        return "look it up in nrt_status.h of the installed Neuron SDK"
