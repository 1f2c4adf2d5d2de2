-- Wait for the transactions that were fenced with a permit that had this slot: @rc is 0 or 1 if none is left.
-- Such a transaction has the fence of the name, in IntentShared, and that of its slots, in Shared; or, if its permit had
-- all slots, only the first, in Shared.
CREATE OR ALTER PROCEDURE sqlsem.internal_behind_1
    @fence nvarchar(60),
    @slot int,
    @mode varchar(32),                       -- 'Exclusive': who gets the slot has all the others too
    @wait int,
    @rc int OUTPUT
AS
SET NOCOUNT ON;
DECLARE @resource nvarchar(255) = CONCAT(@fence, N':', @slot), @done int;
IF @mode <> 'Exclusive' SET @mode = 'IntentExclusive';
EXEC @rc = sys.sp_getapplock @fence, @mode, 'Session', @wait, 'public';
IF @rc >= 0
    EXEC @done = sys.sp_releaseapplock @fence, 'Session', 'public';
IF @rc >= 0 AND @mode <> 'Exclusive'
BEGIN
    EXEC @rc = sys.sp_getapplock @resource, 'Exclusive', 'Session', @wait, 'public';
    IF @rc >= 0
        EXEC @done = sys.sp_releaseapplock @resource, 'Session', 'public';
END;
