"""At home in other libraries; each module here is imported by whoever has the library."""
