"""`python -m hopperflash` is the `hopperflash` command."""

from hopperflash.cli.main import app

if __name__ == "__main__":
    app()
