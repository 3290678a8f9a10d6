"""Pickles in the format of EDM's published networks, and hostile ones. The stand-ins exist while writing alone."""

import contextlib
import pickle
import sys
import types
from collections import OrderedDict

import torch
from torch import nn

PERSISTENCE = "torch_utils.persistence"
CONFIG = {
    "img_resolution": 16,
    "img_channels": 3,
    "label_dim": 10,
    "model_type": "SongUNet",
    "use_fp16": False,
    "sigma_min": 0,
    "sigma_max": float("inf"),
    "sigma_data": 0.5,
    "model_channels": 8,
    "channel_mult": [1, 2],
    "dropout": 0.13,
}


class Global:
    """Pickled as the name of a global, which need not exist."""

    def __init__(self, module, name):
        self.module, self.name = module, name


class Call:
    """Pickled as the call of a global."""

    def __init__(self, module, name, *args, state=None):
        self.function, self.args, self.state = Global(module, name), args, state

    def __reduce__(self):
        return self.function, self.args, self.state


class Pickler(pickle._Pickler):
    """Writes globals by name, without looking them up."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_any_global(self, obj):
        if self.proto >= 4:
            self.save(obj.module)
            self.save(obj.name)
            self.write(pickle.STACK_GLOBAL)
        else:
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        self.memoize(obj)

    def save_reduce(self, func, args, *rest, **named):
        if isinstance(func, Global):
            self.save(func)
            self.save(args)
            self.write(pickle.REDUCE)
            if rest and rest[0] is not None:
                self.save(rest[0])
                self.write(pickle.BUILD)
            return
        super().save_reduce(func, args, *rest, **named)

    dispatch[Global] = save_any_global


def write(path, obj, protocol=4):
    with path.open("wb") as file:
        Pickler(file, protocol).dump(obj)
    return path


def persistent(class_name, parameters=(), buffers=(), modules=(), marker=None, args=(), kwargs=None, **attributes):
    """A module as EDM reduces it; its source, were it run, would write the file `marker`."""
    state = {
        "_init_args": args,
        "_init_kwargs": {} if kwargs is None else kwargs,
        "training": False,
        "_parameters": OrderedDict(parameters),
        "_buffers": OrderedDict(buffers),
        "_non_persistent_buffers_set": {"scratch"},
        "_backward_hooks": OrderedDict(),
        "_is_full_backward_hook": None,
        "_modules": OrderedDict(modules),
        **attributes,
    }
    meta = {"type": "class", "version": 6, "module_src": f"open({str(marker)!r}, 'w')", "class_name": class_name}
    return Call(PERSISTENCE, "_reconstruct_persistent_obj", {**meta, "state": state})


def network(marker=None, deep=None, **outer):
    """A small network, and what its state dict must be.

    Args:
        marker: file that the source text would write.
        deep: what takes the place of the deepest module.
        outer: replaces arguments of `persistent` for the preconditioned network.
    """
    weight, bias = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Parameter(torch.randn(4))
    freqs, taps, linear = torch.randn(5), torch.ones(1, 1, 2, 2) / 4, nn.Linear(2, 3)
    half = nn.Parameter(torch.randn(6, 2).half().t(), requires_grad=False)
    conv = persistent(
        "Conv2d", {"weight": weight, "bias": bias, "none": None}, {"resample_filter": taps, "scratch": freqs},
        marker=marker, kwargs={"in_channels": 3, "out_channels": 4},
    )  # fmt: skip
    enc = nn.ModuleDict()
    enc.__dict__["_modules"] = {"16x16_conv": deep or conv, "16x16_linear": linear, "none": None}
    inner_kwargs = {"img_resolution": 16, "in_channels": 3, "out_channels": 3, "label_dim": 10, "model_channels": 8}
    model = persistent(
        "SongUNet", {"mixed": half}, {"freqs": freqs}, {"enc": enc}, marker, kwargs={**inner_kwargs, "dropout": 0.13}
    )
    options = {
        "modules": {"model": model},
        "kwargs": {"img_resolution": 16, "img_channels": 3, "label_dim": 10, "model_type": "SongUNet"}
        | {"use_fp16": False, "channel_mult": (1, 2)},
        "sigma_min": 0,
        "sigma_max": float("inf"),
        "sigma_data": 0.5,
    }
    expected = {
        "model.mixed": half, "model.freqs": freqs, "model.enc.16x16_conv.weight": weight,
        "model.enc.16x16_conv.bias": bias, "model.enc.16x16_conv.resample_filter": taps,
        "model.enc.16x16_linear.weight": linear.weight, "model.enc.16x16_linear.bias": linear.bias,
    }  # fmt: skip
    return persistent("EDMPrecond", marker=marker, **{**options, **outer}), {
        name: value.detach().clone() for name, value in expected.items()
    }


def published(ema, marker=None):
    """The dict of a published file around a network."""
    loss = persistent("EDMLoss", marker=marker, P_mean=-1.2)
    augment = persistent("AugmentPipe", marker=marker, kwargs={"p": 0.12}, device=torch.device("cuda", 0))
    return {
        "ema": ema,
        "loss_fn": loss,
        "augment_pipe": augment,
        "dataset_kwargs": OrderedDict(path="cifar10.zip", use_labels=True, max_size=50_000),
    }


@contextlib.contextmanager
def module_that_records(name):
    """A module of that name is importable and says whether it was touched; removed afterwards."""
    touched = []

    class Trap(types.ModuleType):
        def __getattr__(self, attribute):
            touched.append(attribute)
            raise AttributeError(attribute)

    parent, _, child = name.rpartition(".")
    sys.modules[name] = Trap(name)
    if parent:
        sys.modules[parent] = types.ModuleType(parent)
        setattr(sys.modules[parent], child, sys.modules[name])
    try:
        yield touched
    finally:
        sys.modules.pop(name)
        sys.modules.pop(parent, None)
