from tests.transfers.conftest import no_descriptor_leaks

__all__ = ["no_descriptor_leaks"]
