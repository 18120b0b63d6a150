-- spool_sweep: return the unreferenced ones of these segments. They accept no references from now on, so that they
-- can be removed. Idempotent.
-- needs: ages, swept
local args = cjson.decode(ARGV[1])

local free = {}
for _, segment in ipairs(args.segments) do
  if redis.call('HEXISTS', 'cotrain:spool:refs', segment) == 0
    and redis.call('HEXISTS', 'cotrain:spool:results', segment) == 0 then
    local key, number = writer_of(segment)
    if not is_swept(segment) then
      redis.call('SET', key, number)
    end
    end_after(key, args.ttl_ms)
    free[#free + 1] = segment
  end
end
return free
