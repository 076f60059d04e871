"""Runs a script on torchtitan with the CPU as its device: ``python torchtitan_on_cpu.py SCRIPT ARGUMENTS``.

The rest of torchtitan is as it is installed. What is replaced, because the CPU or torch 2.13 does not have it:
the device module, the reduction of FSDP, the time-outs of process groups, and attention.
"""

import runpy
import sys
import types

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils


class Cpu(types.ModuleType):
    """What torchtitan asks a device module."""

    Stream, stream, current_stream = torch.cpu.Stream, torch.cpu.stream, torch.cpu.current_stream
    synchronize = torch.cpu.synchronize

    def set_device(self, _):
        pass

    def current_device(self):
        return 0

    def device_count(self):
        return 1

    def get_device_name(self, _=None):
        return "CPU"

    def get_device_properties(self, _=None):
        return types.SimpleNamespace(total_memory=1 << 30, name="CPU")

    def memory_stats(self, _=None):
        return {}

    def reset_peak_memory_stats(self):
        pass

    def empty_cache(self):
        pass


def main():
    utils.device_type, utils.device_module = "cpu", Cpu("cpu")
    # these read the device when they are imported
    from torchtitan.distributed import utils as distributed_utils
    from torchtitan.models.common import attention, config_utils

    # torchtitan 0.3 is written for nightly builds of torch: 2.13 has no torch.distributed.set_timeout
    distributed_utils.set_pg_timeouts = lambda *_, **__: None
    # its models have FlexAttention, which has no backward pass on the CPU
    config_utils.get_attention_config = lambda _: attention.ScaledDotProductAttention.Config()

    divide = FSDPModule.set_gradient_divide_factor

    def sum_and_divide(module, factor):
        module.set_force_sum_reduction_for_comms(True)  # without it gloo refuses the factor
        divide(module, factor)

    FSDPModule.set_gradient_divide_factor = sum_and_divide
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
