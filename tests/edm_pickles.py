"""Writes pickles in the format of EDM's published networks, and hostile ones."""

import pickle
from collections import OrderedDict

import numpy as np
import torch
from torch import nn

from lit_knn.nets import ADM, DDPMpp, NCSNpp
from lit_knn.nets.published.configs import DDPMPP_OPTIONS, NCSNPP_OPTIONS, OPTIONS

# Names of the constructor's arguments that the preconditioned network keeps as attributes.
INTERFACE = ("img_resolution", "img_channels", "label_dim")


class Global:
    """Pickled as the name of a global, which need not exist."""

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __call__(self):
        """Never called: the pickler only asks whether this can be called."""


class Call:
    """Pickled as the call of a global."""

    def __init__(self, module, name, *args):
        self.function, self.args = Global(module, name), args

    def __reduce__(self):
        return self.function, self.args


class Pickler(pickle._Pickler):
    """Writes a `Global` by its name, without looking it up."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_by_name(self, obj):
        self.save(obj.module)
        self.save(obj.name)
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)

    dispatch[Global] = save_by_name


def write(path, obj, protocol=4):
    with path.open("wb") as file:
        Pickler(file, protocol).dump(obj)
    return path


def number(value, core="numpy.core"):
    """A number of NumPy as version 1 writes it; version 2 has the core `numpy._core`."""
    return Call(f"{core}.multiarray", "scalar", value.dtype, value.tobytes())


def persistent(class_name, marker=None, kwargs=None, **attributes):
    """An object as EDM reduces it; the source text of its module would write the file `marker` if it were run."""
    meta = {
        "type": "class",
        "version": 6,
        "module_src": f"open({str(marker)!r}, 'w')",
        "class_name": class_name,
    }
    state = {"_init_args": (), "_init_kwargs": {} if kwargs is None else kwargs, **attributes}
    return Call("torch_utils.persistence", "_reconstruct_persistent_obj", {**meta, "state": state})


def module(class_name, parameters=(), buffers=(), modules=(), **options):
    """A module as EDM reduces it, with a buffer that PyTorch would not save, and a parameter that is None."""
    state = {
        "training": False,
        "_parameters": OrderedDict(parameters) | {"none": None},
        "_buffers": OrderedDict(buffers) | {"scratch": torch.ones(1)},
        "_non_persistent_buffers_set": {"scratch"},
        "_modules": OrderedDict(modules),
    }
    return persistent(class_name, **state, **options)


def state_of(module, *names):
    """The attributes of a module of the file, or of one inside it."""
    state = module.args[0]["state"]
    return state_of(state["_modules"][names[0]], *names[1:]) if names else state


def edm_network(net, use_fp16=False, sigma_data=0.5, marker=None):
    """One of this project's networks in the format of a published file, so that `net` can be read back."""
    families = {
        DDPMpp: ("SongUNet", DDPMPP_OPTIONS),
        NCSNpp: ("SongUNet", NCSNPP_OPTIONS),
        ADM: ("DhariwalUNet", {}),
    }
    model_type, family = families[type(net)]
    config = {**family, **{name: getattr(net, option) for name, option in OPTIONS.items()}}
    interface = {name: config[name] for name in INTERFACE}
    config["in_channels"] = config["out_channels"] = config.pop("img_channels")
    return module(
        "EDMPrecond", modules={"model": _tree(net, model_type, config)}, marker=marker, **interface,
        use_fp16=use_fp16, sigma_min=0, sigma_max=float("inf"), sigma_data=sigma_data,
    )  # fmt: skip


def _tree(part, class_name=None, kwargs=None):
    children = {name: _tree(child) for name, child in part.named_children()}
    if isinstance(part, nn.ModuleDict):
        container = nn.ModuleDict()
        container.__dict__["_modules"] = {**children, "none": None}
        return container
    parameters, buffers = (
        dict(part.named_parameters(recurse=False)),
        dict(part.named_buffers(recurse=False)),
    )
    # EDM's constructors keep some numbers of NumPy.
    kwargs = {"init_weight": number(np.sqrt(1 / 3))} if kwargs is None else kwargs
    return module(class_name or type(part).__name__, parameters, buffers, children, kwargs=kwargs)


def network(marker=None):
    """A small network in the format, and its weights by their names in the file."""
    net = DDPMpp(16, channels=4, multipliers=(1,), blocks=1, attention_at=(), num_classes=10)
    ema = edm_network(net, marker=marker)
    return ema, {
        f"model.{name}": value.detach().clone() for name, value in net.state_dict().items()
    }


def published(ema, marker=None):
    """The dict that a published file has around its network."""
    loss = persistent("EDMLoss", marker, P_mean=-1.2, P_std=1.2, sigma_data=0.5)
    return {
        "ema": ema,
        "loss_fn": loss,
        "dataset_kwargs": Call("dnnlib.util", "EasyDict", {"path": "cifar10.zip"}),
    }
