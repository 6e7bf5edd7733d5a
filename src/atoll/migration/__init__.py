"""Sessions that go elsewhere while their programs run: what may go where, and how it is done."""
