"""python -m bench.attention"""

from bench.attention.program import main

if __name__ == "__main__":
    main()
