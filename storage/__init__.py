"""What orch keeps in PostgreSQL, and how it is opened."""
