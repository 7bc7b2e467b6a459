"""Package definition. `kernels`, `recipes` and `launchers` live at the top of the repository and are installed inside
the `megarl` name space, because PyPI already has a top-level package named `kernels`."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "megarl/__init__.py").read_text()).group(1)
MAPPED = ["launchers", "recipes", "kernels"]


def mapped_packages(folder: str) -> list[str]:
    """megarl.<folder> and everything below it."""
    return [f"megarl.{folder}", *(f"megarl.{folder}.{name}" for name in find_packages(folder))]


setup(
    name="megarl",
    version=VERSION,
    description="Large-scale post-training of language models on Megatron-Core",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    package_dir={"megarl": "megarl", **{f"megarl.{name}": name for name in MAPPED}},
    packages=[
        "megarl",
        *(f"megarl.{name}" for name in find_packages("megarl")),
        *(package for folder in MAPPED for package in mapped_packages(folder)),
    ],
    package_data={
        "megarl.recipes": ["*.yaml"],
        "megarl.config": ["*.json"],
        "megarl.tracking": ["*.html", "*.css", "*.js"],
    },
    entry_points={"console_scripts": ["megarl=megarl.cli:main"]},
    install_requires=[
        "torch>=2.8",
        "megatron-core>=0.16.1,<0.17",
        "transformers>=4.56",
        "tensordict>=0.9",
        "safetensors>=0.5",
        "pydantic>=2.7",
        "numpy>=1.26",
        "scipy>=1.11",
        "scikit-learn>=1.4",
        "pyyaml>=6",
        "jinja2>=3.1",
        "rich>=13",
        "psutil>=5.9",
        "datasets>=3.0",
        "pyarrow>=15",
        "math-verify>=0.7",
        "mlflow>=3.0",
        "ray>=2.40",
    ],
    extras_require={
        "gpu": ["flash-attn>=2.6", "transformer-engine[pytorch]>=2.0"],
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "hypothesis>=6.100",
            "ruff>=0.9",
            "mypy>=1.13",
            "import-linter>=2.1",
            "pre-commit>=4",
            "build>=1.2",
            "types-PyYAML",
            "mbridge==0.15.1",
        ],
    },
)
