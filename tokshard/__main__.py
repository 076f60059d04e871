"""``python -m tokshard`` is the command ``tokshard``."""

from tokshard.cli.main import main

if __name__ == "__main__":
    main()
