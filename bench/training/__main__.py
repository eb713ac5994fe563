"""python -m bench.training"""

from bench.training.program import main

if __name__ == "__main__":
    main()
