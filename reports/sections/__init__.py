"""The report's sections: each a function from records to blocks."""
