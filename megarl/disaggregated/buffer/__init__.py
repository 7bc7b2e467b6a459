"""The buffer between teams: samples and mail that one team makes and another one needs."""
