-- spool_refs: release of the references that ops have to bodies in the spool.
local function release_segment(segment)
  if segment and redis.call('HINCRBY', 'cotrain:spool:refs', segment, -1) <= 0 then
    redis.call('HDEL', 'cotrain:spool:refs', segment)
  end
end

local function release_body(envelope)
  if string.sub(envelope, 1, 8) ~= 'forward|' then -- a forward's body was released at its commit
    -- Not greedy: the reference is the last of five fields and holds no '|'.
    release_segment(string.match(envelope, '|spool:([^:|]+):[^|]*$'))
  end
end
