"""Engines: what makes a guest and holds it to its limits. Everything above is engine-blind."""
