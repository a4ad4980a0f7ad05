"""Health tables for tests, given by their differences from a whole network."""

from r2ccl.failover.health.table import Health, RailShare


def health(nranks: int = 4, nrails: int = 4, **shares: int) -> Health:
    """Return a health with exceptions: ``r1n2=4`` is rail 1 of rank 2 at 4 sixteenths."""
    news = [
        RailShare(int(name.partition("n")[2]), int(name.partition("n")[0][1:]), share)
        for name, share in shares.items()
    ]
    return Health.whole(nranks, nrails).changed(news)
