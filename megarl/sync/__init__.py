"""Weights from the trainer to whatever generates: plan, gathering, transports, protocol, verification."""
