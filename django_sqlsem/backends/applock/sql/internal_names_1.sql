-- The resources and the key of a name.
-- @base: ends the resources of its slots, '<slot>-<base>'; its holders have it too. @key: its rows, the first 32 hex
-- digits of the SHA-256 of its UTF-8. The gate, which the first in line has, is 'sqlsem:g:' and the first 20 of them.
CREATE OR ALTER PROCEDURE sqlsem.internal_names_1
    @name nvarchar(4000),                    -- longer than names may be: else a long one is cut without a word
    @base nvarchar(255) OUTPUT,
    @key nvarchar(32) OUTPUT
AS
SET NOCOUNT ON;
DECLARE @digest varchar(64), @hex varchar(1600) = '', @i int = 1, @code int, @next int, @characters int = 0,
    @ill int = 0, @more int, @byte int, @digits int,
    @why nvarchar(2048);
SET @ill = CASE WHEN @name IS NULL OR DATALENGTH(@name) = 0 OR DATALENGTH(@name) > 800 THEN 1 ELSE 0 END;
IF @ill = 0 AND @name COLLATE Latin1_General_100_BIN2 NOT LIKE N'%[^ -~]%'
    SELECT @digest = LOWER(CONVERT(varchar(64), HASHBYTES('SHA2_256', CAST(@name AS varchar(400))), 2)),
        @characters = LEN(CONCAT(@name, N'x')) - 1;
ELSE IF @ill = 0
BEGIN
    -- UTF-8 by hand: a server's own conversion needs a collation that the database may not have.
    WHILE DATALENGTH(SUBSTRING(@name COLLATE Latin1_General_100_BIN2, @i, 1)) > 0 AND @ill = 0
    BEGIN
        SET @code = UNICODE(SUBSTRING(@name COLLATE Latin1_General_100_BIN2, @i, 1));
        SET @next = UNICODE(SUBSTRING(@name COLLATE Latin1_General_100_BIN2, @i + 1, 1));
        IF @code BETWEEN 55296 AND 56319 AND @next BETWEEN 56320 AND 57343
            SELECT @code = 65536 + (@code - 55296) * 1024 + @next - 56320, @i = @i + 1;
        IF @code = 0 OR @code BETWEEN 55296 AND 57343 SET @ill = 2;
        SET @more = CASE WHEN @code < 128 THEN 0 WHEN @code < 2048 THEN 1 WHEN @code < 65536 THEN 2 ELSE 3 END;
        SET @byte = CASE @more WHEN 0 THEN @code WHEN 1 THEN 192 + @code / 64 WHEN 2 THEN 224 + @code / 4096
            ELSE 240 + @code / 262144 END;
        SET @hex = CONCAT(@hex, SUBSTRING('0123456789ABCDEF', @byte / 16 + 1, 1),
            SUBSTRING('0123456789ABCDEF', @byte % 16 + 1, 1));
        WHILE @more > 0
        BEGIN
            SET @more = @more - 1;
            SET @byte = 128 + @code / POWER(64, @more) % 64;
            SET @hex = CONCAT(@hex, SUBSTRING('0123456789ABCDEF', @byte / 16 + 1, 1),
                SUBSTRING('0123456789ABCDEF', @byte % 16 + 1, 1));
        END;
        SELECT @i = @i + 1, @characters = @characters + 1;
    END;
    SET @digest = LOWER(CONVERT(varchar(64), HASHBYTES('SHA2_256', CONVERT(varbinary(800), @hex, 2)), 2));
END;
IF @ill = 1 OR @characters > 200
BEGIN
    SET @why = CONCAT(N'@name must have 1 to 200 characters, not ', CASE WHEN @name IS NULL THEN N'NULL'
        WHEN @ill = 1 THEN CONCAT(DATALENGTH(@name) / 2, N' UTF-16 units') ELSE CAST(@characters AS nvarchar(11)) END,
        N': ', REPLACE(LEFT(@name, 40), N'%', N'%%'));   -- THROW takes a single one for the start of a format
    THROW 59301, @why, 1;
END;
IF @ill = 2
    THROW 59301, N'@name must not contain a NUL character, or half a surrogate pair.', 1;
SET @key = LEFT(@digest, 32);
-- A name that begins like a slot or like our own locks, or is too long for a resource, goes by its key.
SET @digits = PATINDEX(N'%[^0-9]%', @name COLLATE Latin1_General_100_BIN2);
SET @base = CASE WHEN DATALENGTH(@name) > 488 OR LEFT(@name COLLATE Latin1_General_100_BIN2, 7) = N'sqlsem:'
    OR (@digits > 1 AND SUBSTRING(@name COLLATE Latin1_General_100_BIN2, @digits, 1) = N'-')
    THEN CONCAT(N'sqlsem:', @key) ELSE @name END;
