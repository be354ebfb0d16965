"""Run files: schema, loading, other tools' spellings, and checks across sections."""
