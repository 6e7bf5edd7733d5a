"""The hosts that a host exchanges bulk bytes with: who dials and listens, and who is no longer heard."""
