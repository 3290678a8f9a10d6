"""Every recipe of `configs/estimators`, as functions that make new estimators."""

import importlib

import yaml

from lit_knn.estimators import ByClass, OneSample
from tests import ROOT

FOLDER = ROOT / "configs" / "estimators"


def made(recipe, **options):
    """Make the object that `class_path` and `init_args` describe; `options` replace arguments that it has."""
    folder, _, name = recipe["class_path"].rpartition(".")
    arguments = {
        key: _nested(value, options) for key, value in (recipe.get("init_args") or {}).items()
    }
    arguments |= {key: value for key, value in options.items() if key in arguments}
    return getattr(importlib.import_module(folder), name)(**arguments)


def _nested(value, options):
    return made(value, **options) if isinstance(value, dict) and "class_path" in value else value


def every_estimator(**options):
    """Functions by name that make an estimator; `options` such as k replace the recipes' where they have them."""
    recipes = {
        path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yaml"))
    }
    return {name: lambda recipe=recipe: made(recipe, **options) for name, recipe in recipes.items()}


def every_class_estimator(**options):
    """The same, each over the images of one class. OneSample uses no images."""
    makers = every_estimator(**options).items()
    return {
        name: lambda make=make: ByClass(make())
        for name, make in makers
        if not isinstance(make(), OneSample)
    }
