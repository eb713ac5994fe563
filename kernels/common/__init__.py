"""Parts shared by several operators: input checks, dropout, documents, dtypes, launching, registration and rounding."""
