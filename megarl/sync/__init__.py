"""Weights from the trainer to generation servers: plan, gathering, transports, protocol, verification."""
