-- records: bytes of a tenant's records of sessions and runs, which are kept permanently. A client may create any
-- number of both, and write notes to each.
local RECORD_OVERHEAD = 1000 -- bytes of Redis for the keys and list entries of one record

local function record_bytes(tenant)
  return tonumber(redis.call('GET', 'cotrain:tenant:' .. tenant .. ':record_bytes') or 0)
end

local function count_record(tenant, record)
  redis.call('INCRBY', 'cotrain:tenant:' .. tenant .. ':record_bytes', #record + RECORD_OVERHEAD)
end
