"""Configuration: the YAML groups, the typed schema behind them, and the command line that composes them."""
