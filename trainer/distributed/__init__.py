"""Training on several processes: who they are, and how they share the model."""
