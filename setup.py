"""Maps the folder `configs` into the package, as `lit_knn/configs`; pyproject.toml has everything else.

A wheel then holds the configs, and a checkout keeps them where its commands name them.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=[
        *find_namespace_packages(include=["lit_knn", "lit_knn.*"]),
        "lit_knn.configs",
        *(f"lit_knn.configs.{folder}" for folder in find_namespace_packages("configs")),
    ],
    package_dir={"lit_knn.configs": "configs"},
)
