"""Parts that several operators share: launching, registration, input checks, dropout, rounding."""
