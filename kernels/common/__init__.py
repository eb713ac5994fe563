"""Parts shared by several operators: input checks, dropout, documents, launching, registration and rounding."""
