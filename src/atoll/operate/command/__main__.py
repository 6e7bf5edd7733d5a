"""`python -m atoll.operate.command` is the command `atoll`."""

from atoll.operate.command import main

if __name__ == "__main__":
    main()
