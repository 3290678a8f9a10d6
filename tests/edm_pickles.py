"""Pickles in the format of EDM's published networks, and hostile ones; stand-in classes exist only during writing."""

import contextlib
import pickle
import sys
import types
from collections import OrderedDict

import numpy as np
import torch
from torch import nn

from lit_knn.nets import ADM, DDPMpp, NCSNpp
from lit_knn.nets.layers import ResidualBlock
from lit_knn.nets.published.configs import DDPMPP_OPTIONS, NCSNPP_OPTIONS, OPTIONS

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


HOOKS = ("_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks")
# EDM's constructors get these arguments, and some keep them: NumPy's numbers among Python's.
SCALARS = {"init_mode": "kaiming_uniform", "init_weight": np.sqrt(1 / 3), "init_bias": np.sqrt(1 / 3)}
BLOCK = {"attention": False, "skip_scale": np.sqrt(0.5), "eps": 1e-6, "resample_filter": [1, 1], "init": SCALARS}
BLOCK |= {"init_attn": {"init_mode": "xavier_uniform", "init_weight": np.sqrt(0.2)}}
NUMPY_1, NUMPY_2 = "numpy.core", "numpy._core"


class EasyDict(dict):
    """Pickled as EDM's dict with attributes."""


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
    """Writes globals by name, without looking them up; NumPy's globals get the names of the given NumPy version."""

    dispatch = pickle._Pickler.dispatch.copy()

    def __init__(self, file, protocol, numpy_core):
        super().__init__(file, protocol)
        self.numpy_core = numpy_core

    def save_any_global(self, obj):
        self.write_name(obj.module, obj.name, obj)

    def write_name(self, module, name, obj):
        if self.proto >= 4:
            self.save(module)
            self.save(name)
            self.write(pickle.STACK_GLOBAL)
        else:
            self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())
        self.memoize(obj)

    def save_global(self, obj, name=None):
        module = getattr(obj, "__module__", None) or ""
        if obj is EasyDict:
            self.write_name("dnnlib.util", "EasyDict", obj)
        elif module.startswith((NUMPY_1, NUMPY_2)):
            # The memo compares by identity, so equal names must be one object.
            module = sys.intern(f"{self.numpy_core}.{module.rpartition('.')[2]}")
            self.write_name(module, name or obj.__name__, obj)
        else:
            super().save_global(obj, name)

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
    dispatch[types.FunctionType] = save_global


def write(path, obj, protocol=4, numpy_core=NUMPY_1):
    with path.open("wb") as file:
        Pickler(file, protocol, numpy_core).dump(obj)
    return path


def persistent(class_name, parameters=(), buffers=(), modules=(), marker=None, args=(), kwargs=None, **attributes):
    """A module as EDM reduces it; its source would write the file `marker` if it were run."""
    state = {
        "training": False,
        "_parameters": OrderedDict(parameters),
        "_buffers": OrderedDict(buffers),
        "_non_persistent_buffers_set": {"scratch"},
        **{name: OrderedDict() for name in HOOKS},
        "_is_full_backward_hook": None,
        "_modules": OrderedDict(modules),
    }
    return persistent_object(class_name, marker, args, kwargs, **{**state, **attributes})


def persistent_object(class_name, marker=None, args=(), kwargs=None, **attributes):
    """An object as EDM reduces it: its attributes, its constructor's arguments, and the source of its module."""
    source = f"# A comment, so that the text is as long as one of a module.{' ' * 250}\nopen({str(marker)!r}, 'w')"
    meta = {"type": "class", "version": 6, "module_src": source, "class_name": class_name}
    state = {"_init_args": args, "_init_kwargs": {} if kwargs is None else kwargs, **attributes}
    return Call(PERSISTENCE, "_reconstruct_persistent_obj", {**meta, "state": state})


def network(marker=None, deep=None, **outer):
    """A small network and its expected state dict.

    Args:
        marker: file that the source text would write.
        deep: object that replaces the deepest module.
        outer: replaces arguments of `persistent` for the preconditioned network.
    """
    weight, bias = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Parameter(torch.randn(4))
    freqs, taps = torch.randn(5), torch.ones(1, 1, 2, 2) / 4
    linear = {"weight": nn.Parameter(torch.randn(3, 2)), "bias": nn.Parameter(torch.randn(3))}
    half = nn.Parameter(torch.randn(6, 2).half().t(), requires_grad=False)
    conv = persistent(
        "Conv2d", {"weight": weight, "bias": bias, "none": None}, {"resample_filter": taps, "scratch": freqs},
        marker=marker, kwargs={"in_channels": 3, "out_channels": 4, **SCALARS},
    )  # fmt: skip
    block = persistent("UNetBlock", marker=marker, kwargs=BLOCK, skip_scale=np.sqrt(0.5))
    enc = nn.ModuleDict()
    enc.__dict__["_modules"] = {
        "16x16_conv": deep or conv, "16x16_linear": persistent("Linear", linear), "16x16_block0": block, "none": None,
    }  # fmt: skip
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
        "model.enc.16x16_linear.weight": linear["weight"], "model.enc.16x16_linear.bias": linear["bias"],
    }  # fmt: skip
    return persistent("EDMPrecond", marker=marker, **{**options, **outer}), {
        name: value.detach().clone() for name, value in expected.items()
    }


def config_of(net):
    """The arguments of the published constructor that makes `net`."""
    families = {DDPMpp: ("SongUNet", DDPMPP_OPTIONS), NCSNpp: ("SongUNet", NCSNPP_OPTIONS), ADM: ("DhariwalUNet", {})}
    model_type, family = families[type(net)]
    return {"model_type": model_type, **family, **{name: getattr(net, option) for name, option in OPTIONS.items()}}


def edm_network(net, use_fp16=False, sigma_data=0.5):
    """One of this project's networks in the format of a published file, so that `net` can be read back."""
    config = config_of(net)
    options = {**config, "use_fp16": use_fp16}
    inner = {name: value for name, value in config.items() if name not in ("model_type", "img_channels")}
    inner |= {"in_channels": config["img_channels"], "out_channels": config["img_channels"]}
    interface = {name: config[name] for name in ("img_resolution", "img_channels", "label_dim")}
    return persistent(
        "EDMPrecond", modules={"model": _persistent_tree(net, config["model_type"], kwargs=inner)}, kwargs=options,
        **interface, use_fp16=use_fp16, sigma_min=0, sigma_max=float("inf"), sigma_data=sigma_data,
    )  # fmt: skip


def _persistent_tree(module, class_name=None, kwargs=None):
    children = {name: _persistent_tree(part) for name, part in module.named_children()}
    if isinstance(module, nn.ModuleDict):
        container = nn.ModuleDict()
        container.__dict__["_modules"] = children
        return container
    own = (dict(tensors(recurse=False)) for tensors in (module.named_parameters, module.named_buffers))
    if isinstance(module, ResidualBlock):
        return persistent("UNetBlock", *own, children, kwargs=BLOCK, skip_scale=np.sqrt(0.5))
    return persistent(class_name or type(module).__name__, *own, children, kwargs=kwargs or SCALARS)


def published(ema, marker=None):
    """The dict that a published file has around its network."""
    loss = persistent_object("EDMLoss", marker, P_mean=-1.2, P_std=1.2, sigma_data=0.5)
    options = {"p": 0.12, "xflip": 1e8, "yflip": 1, "scale": 1, "rotate_frac": 1, "aniso": 1, "translate_frac": 1}
    augment = persistent_object("AugmentPipe", marker, kwargs=options, **options, scale_std=0.2, rotate_int=0.0)
    return {
        "ema": ema,
        "loss_fn": loss,
        "augment_pipe": augment,
        "dataset_kwargs": EasyDict(
            class_name="training.dataset.ImageFolderDataset", path="cifar10.zip", use_labels=True, xflip=False,
            cache=True, resolution=32, max_size=50_000,
        ),
    }  # fmt: skip


@contextlib.contextmanager
def module_that_records(name):
    """Make a module with this name importable for a while; it records whether it was touched."""
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
