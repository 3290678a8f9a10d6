"""The application from a checkout: `python main.py fit -c configs/demo.yaml` is `lit-knn fit -c demo`."""

from lit_knn.commands.entry import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
