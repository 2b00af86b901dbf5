"""Foundation of every op; the only code that uses `torch.library` and Triton's driver."""

from .autocast import autocasted
from .backend import backend, launch_device, serves, set_backend
from .capabilities import GPUS, Capabilities, warp_size_of
from .catalogue import catalogue
from .choices import choice
from .fields import Fields, G, Maybe, MaybeNumber, MaybeStr, Present, Written
from .launch import (
    BoundLaunch,
    Kernel,
    Launch,
    capabilities_of,
    choosing_for,
    is_recording,
    kernel,
    observing,
    recorded_by,
    recording,
)
from .memory import PLAIN, contiguous_copy, current_workspace, overlap, overlaps_itself, scratch, workspace
from .ops import (
    LATER,
    Backward,
    Gradients,
    Nothing,
    Op,
    apply,
    is_observed,
    is_readable,
    is_transformed,
    later,
    plain_gradient,
    register_gradient_decoder,
)
from .remembered import remembered
from .sharding import Sharding, is_distributed, local_of, local_rows, place_like, summed
from .variant import TARGETS, Variant

__all__ = [
    "GPUS",
    "LATER",
    "PLAIN",
    "TARGETS",
    "Backward",
    "BoundLaunch",
    "Capabilities",
    "Fields",
    "G",
    "Gradients",
    "Kernel",
    "Launch",
    "Maybe",
    "MaybeNumber",
    "MaybeStr",
    "Nothing",
    "Op",
    "Present",
    "Sharding",
    "Variant",
    "Written",
    "apply",
    "autocasted",
    "backend",
    "capabilities_of",
    "catalogue",
    "choice",
    "choosing_for",
    "contiguous_copy",
    "current_workspace",
    "is_distributed",
    "is_observed",
    "is_readable",
    "is_recording",
    "is_transformed",
    "kernel",
    "later",
    "launch_device",
    "local_of",
    "local_rows",
    "observing",
    "overlap",
    "overlaps_itself",
    "place_like",
    "plain_gradient",
    "recorded_by",
    "recording",
    "register_gradient_decoder",
    "remembered",
    "scratch",
    "serves",
    "set_backend",
    "summed",
    "warp_size_of",
    "workspace",
]
