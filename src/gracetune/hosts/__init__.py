"""gracetune beside other trainers: inside them unforked, or keeping a fork of one alive."""
