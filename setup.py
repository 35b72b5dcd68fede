from setuptools import find_packages, setup

setup(
    name="mrl",
    version="0.1.0",
    description="Reinforcement learning for large language models at Megatron scale",
    python_requires=">=3.11",
    packages=find_packages(include=["mrl", "mrl.*"]),
    entry_points={"console_scripts": ["mrl=mrl.cli:main"]},
)
