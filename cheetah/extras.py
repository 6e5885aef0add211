"""What to type to get what an optional part of Cheetah needs: the extras of pyproject.toml."""


def installing(extra: str) -> str:
    """The command that adds an extra, as the README installs Cheetah: from a checkout, no package index has it."""
    return f"pip install '.[{extra}]' in Cheetah's checkout"
