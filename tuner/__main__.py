"""`python -m tuner`: the command line, whatever other package owns the script named `tune`."""

from tuner.cli import main

if __name__ == "__main__":
    main()
